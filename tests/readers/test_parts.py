"""Parts of large files: read one after the other they are the whole file, wherever the cuts fall."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from hone.base.run import Run
from hone.data.stage import Data
from hone.feed.files.listing import File, list_source
from hone.readers import json_rows
from hone.readers import parts as parts_module
from hone.readers.documents import Broken, Document, Options
from hone.readers.parts import parts
from hone.readers.read import read_file
from tests.data.stories import story

SIZES = [1, 2, 7, 40, 41, 97, 500, 1009, 4096, 33_333]


def one(path: Path) -> File:
    (file,) = list_source(str(path)).files
    return file


def everything(files: list[File], **options) -> tuple[list[Document], list[Broken]]:
    """The documents in order; what is broken, sorted: inside a batch the broken come last."""
    items = [item for file in files for item in read_file(file, Options(**options))]
    return [item for item in items if isinstance(item, Document)], sorted(
        item for item in items if isinstance(item, Broken)
    )


def lines(seed: int) -> bytes:
    """Rows of all sorts: sound, broken, blank, long, in many scripts, with either line end; the last one may not be closed."""
    draw = random.Random(seed)
    made = []
    for number in range(draw.randrange(1, 120)):
        text = draw.choice(["plain", "żółć", "日本語" * 9, "", "\u2028", "x" * draw.randrange(3000)]) + f" {number}"
        good = json.dumps({"text": text, "url": f"https://a.b/{number}"}, ensure_ascii=draw.random() < 0.5)
        bad = draw.choice(["", "{broken", '{"other": 1}', "[1]", '{"text": null}', "  ", '{"text": "\\ud800"}'])
        made.append((good if draw.random() < 0.8 else bad).encode() + draw.choice([b"\n", b"\n", b"\r\n"]))
    raw = draw.choice([b"", b"", b"\xef\xbb\xbf"]) + b"".join(made)
    return raw.rstrip(b"\n") if draw.random() < 0.3 else raw


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_jsonl_is_the_same_whole_and_in_parts_of_any_size(tmp_path, monkeypatch, seed):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(seed))
    file = one(path)
    whole = everything([file])
    for size in SIZES:
        monkeypatch.setattr(parts_module, "PART_BYTES", size)
        if file.size // size > 20_000:
            continue
        cut = parts(file, Options())
        assert sum(part.size for part in cut) == file.size and len(cut) == max(-(-file.size // size), 1)
        assert everything(cut) == whole


def test_a_line_belongs_to_the_part_that_its_first_byte_lies_in(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"text": "twenty bytes"}).encode() + b"\n"
    path.write_bytes(row * 4)
    monkeypatch.setattr(parts_module, "PART_BYTES", len(row))
    for shift, counts in ((0, [1, 1, 1, 1]), (1, [2, 1, 1, 0]), (-1, [1, 1, 1, 1, 0])):
        monkeypatch.setattr(parts_module, "PART_BYTES", len(row) + shift)
        cut = parts(one(path), Options())
        assert [len(everything([part])[0]) for part in cut] == counts


def test_a_row_that_is_too_long_is_set_aside_once(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 5000)
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", 4096)
    good = json.dumps({"text": "a row that is fine"}) + "\n"
    path = tmp_path / "rows.jsonl"
    long = json.dumps({"text": "y" * 3_000_000}) + "\n"
    path.write_text(good * 3 + long + good * 2 + long)
    whole = everything([one(path)])
    assert len(whole[0]) == 5 and [item.reason for item in whole[1]] == ["row_too_long"] * 2
    for size in (1000, 65_537, 1_000_000, 3_000_100):
        monkeypatch.setattr(parts_module, "PART_BYTES", size)
        cut = parts(one(path), Options())
        documents, broken = everything(cut)
        assert documents == whole[0]
        assert [(item.reason, item.source) for item in broken] == [("row_too_long", "rows.jsonl")] * 2
        assert abs(sum(item.num_bytes for item in broken) - 2 * len(long)) <= 4


def table(path: Path, texts: list[str | None], group: int) -> None:
    urls = [f"https://a.b/{number}" for number in range(len(texts))]
    columns = {"text": pa.array(texts, pa.string()), "url": urls, "more": list(range(len(texts)))}
    parquet.write_table(pa.table(columns), path, row_group_size=group)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 3, 50, 1000])
def test_parquet_is_the_same_whole_and_in_parts(tmp_path, monkeypatch, group):
    draw = random.Random(group)
    texts = [draw.choice(["some text ", "日本語 ", ""]) * draw.randrange(30) or None for _ in range(200)]
    path = tmp_path / "rows.parquet"
    table(path, texts, group)
    file = one(path)
    whole = everything([file], metadata_fields=("more",))
    assert len(whole[0]) > 50 and len(whole[1]) > 10
    ids = [document.id for document in whole[0]]
    assert len(set(ids)) == len(ids)
    counts = set()
    for size in SIZES:
        monkeypatch.setattr(parts_module, "PART_BYTES", size)
        cut = parts(file, Options())
        counts.add(len(cut))
        assert sum(part.size for part in cut) == file.size
        assert everything(cut, metadata_fields=("more",)) == whole
    assert max(counts) == -(-200 // group)


def test_rows_keep_their_ids_when_others_before_them_break(tmp_path):
    """A row's number is its place: mending one row changes no other document's id or split."""
    good = json.dumps({"text": "first row"}) + "\n"
    last = json.dumps({"text": "last row"}) + "\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(good + last)
    before = everything([one(path)])[0][1].id
    path.write_text("x" * (len(good) - 1) + "\n" + last)
    ((after,), broken) = everything([one(path)])
    assert after.id == before and [item.reason for item in broken] == ["bad_json"]


def test_what_cannot_be_read_at_all_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_BYTES", 50)
    wide = tmp_path / "wide.jsonl"
    wide.write_text(json.dumps({"text": "x" * 999}) + "\n", encoding="utf-16")
    cut_off = tmp_path / "cut.parquet"
    table(cut_off, ["some text"] * 99, 9)
    cut_off.write_bytes(cut_off.read_bytes()[:-9])
    other = tmp_path / "other.parquet"
    parquet.write_table(pa.table({"body": ["some text"] * 99}), other, row_group_size=9)
    reasons = {"wide.jsonl": "wrong_encoding", "cut.parquet": "bad_parquet", "other.parquet": "no_text_field"}
    for name, reason in reasons.items():
        file = one(tmp_path / name)
        assert parts(file, Options()) == [file]
        assert [(item.reason, item.num_bytes) for item in everything([file])[1]] == [(reason, file.size)]
    gone = replace(one(wide), path=tmp_path / "gone.jsonl")
    assert parts(gone, Options()) == [gone]


def test_what_has_no_places_to_begin_at_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "PART_BYTES", 50)
    for name in ("a.txt", "a.jsonl.gz", "a.html", "a.warc"):
        (tmp_path / name).write_text("x" * 999)
        assert len(parts(one(tmp_path / name), Options())) == 1


def test_a_damaged_row_group_costs_its_part_alone(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    table(path, [f"{number} " * 400 for number in range(40)], 10)
    whole = everything([one(path)])[0]
    with parquet.ParquetFile(path) as read:
        start = (
            read.metadata.row_group(2).column(0).dictionary_page_offset
            or read.metadata.row_group(2).column(0).data_page_offset
        )
    raw = bytearray(path.read_bytes())
    raw[start : start + 60] = bytes(60)
    path.write_bytes(raw)
    monkeypatch.setattr(parts_module, "PART_BYTES", 8000)
    cut = parts(one(path), Options())
    assert len(cut) == 4
    documents, broken = everything(cut)
    assert documents == [*whole[:20], *whole[30:]]
    assert [(item.reason, item.num_bytes) for item in broken] == [("bad_parquet", cut[2].size)]


@pytest.mark.slow
def test_the_stage_writes_the_same_documents_and_tokens_whatever_the_parts(tmp_path, monkeypatch):
    source = tmp_path / "in"
    source.mkdir()
    texts = [story(number, 120) for number in range(60)] + [story(3, 120)]
    (source / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:30]) + "{broken\n")
    table(source / "b.parquet", texts[30:], 7)
    spec = {"tokenizer": {"vocab_size": 400}, "filters": ["length"]}
    made = {}
    for size in (1 << 30, 3000, 9973):
        monkeypatch.setattr(parts_module, "PART_BYTES", size)
        # Many parts, some of them of one row, are what workers share.
        others = [{"kind": "processes", "workers": 2}] if size == 3000 else []
        for executor in ({"kind": "serial"}, *others):
            out = tmp_path / f"{size}-{executor['kind']}" / "data-text"
            made[size, executor["kind"]] = Data.read({"source": str(source), **spec}).make(
                out, run=Run(quiet=True, executor=executor)
            )
    assert made[3000, "serial"].content == made[3000, "processes"].content
    first = made[1 << 30, "serial"]
    for artifact in made.values():
        for name in ("tokenizer.json", "tokens/train.bin", "tokens/train.starts.npy", "sample.jsonl", "dropped.jsonl"):
            assert (artifact.folder / name).read_bytes() == (first.folder / name).read_bytes()
        rows_of = [parquet.read_table(path) for path in sorted((artifact.folder / "documents").iterdir())]
        whole = [parquet.read_table(path) for path in sorted((first.folder / "documents").iterdir())]
        assert pa.concat_tables(rows_of).equals(pa.concat_tables(whole))
    assert len(list((made[3000, "serial"].folder / "documents").iterdir())) > 5
