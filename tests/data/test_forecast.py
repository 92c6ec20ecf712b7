"""The data stage's forecast: what is known of a source is found from a part of it, within what the estimate promises."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.base.run import Run
from hone.data import forecast
from hone.data.forecast import _items, sample
from hone.data.stage import Data
from hone.feed.files.listing import list_source
from hone.readers.documents import Batch, Options
from tests.data.stories import story

SOUND = {"filters": ["length"], "dedups": [], "tokenizer": {"vocab_size": 400}}


def stories(count: int, words: int = 240, first: int = 0) -> list[str]:
    return [story(first + number, words) for number in range(count)]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(rows.encode()) if path.suffix == ".gz" else rows.encode())
    return path


def write_record(number: int, text: str) -> bytes:
    page = f"<html><body><p>{text}</p></body></html>".encode()
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(page) + page
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/{number}\r\n"
        f"WARC-Date: 2020-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-{number:012d}>\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def write_in(folder: Path, format_: str, texts: list[str]) -> Path:
    folder.mkdir(parents=True)
    if format_ in ("jsonl", "jsonl.gz"):
        write_rows(folder / f"rows.{format_}", texts)
    elif format_ == "parquet":
        parquet.write_table(pa.table({"text": texts}), folder / "rows.parquet", len(texts) // 60, compression="none")
    elif format_ == "txt":
        (folder / "rows.txt").write_text("<|endoftext|>".join(texts))
    elif format_ == "warc":
        (folder / "rows.warc").write_bytes(b"".join(write_record(*row) for row in enumerate(texts)))
    else:
        for number, text in enumerate(texts):
            (folder / f"{number:05d}.md").write_text(text)
    return folder


def sampled(source: Path, tmp_path: Path, num_bytes: float = 1_000_000, **options):
    """(pieces, documents, for how many documents each of these stands) of a sample of the files in `source`."""
    folder = tmp_path / f"parts-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    pieces = sample(list_source(str(source)).files, Options(**options), folder, num_bytes)
    of, weights = {}, np.zeros(len(pieces))
    items = list(_items(pieces, Options(**options), of, weights))
    read = [document for item in items if isinstance(item, Batch) for document in item.documents()]
    return pieces, read, weights[[of[item.id] for item in read]]


@pytest.mark.parametrize("format_", ["jsonl", "jsonl.gz", "parquet", "txt", "warc", "md"])
def test_a_sample_is_read_at_places_in_all_parts_of_the_input(format_, tmp_path):
    texts = stories(1500)
    source = write_in(tmp_path / "in", format_, texts)
    _, read, weights = sampled(source, tmp_path, 300_000)
    place = {text: number for number, text in enumerate(texts)}
    found = [place[item.text] for item in read if item.text in place]
    one_stream = format_ in ("jsonl.gz", "txt", "warc")  # of which the beginning is read
    assert len(read) - len(found) <= one_stream  # the last of a beginning is cut
    assert len({item.id for item in read}) == len(read) == len(set(found)) + len(read) - len(found)
    assert 0.05 < len(read) / len(texts) < 0.6
    share = np.histogram(found, bins=5, range=(0, max(found) + 1 if one_stream else len(texts)))[0]
    assert share.min() > 0.5 * share.max()
    total = sum(map(len, texts))
    assert (weights * [len(item.text) for item in read]).sum() == pytest.approx(total, rel=0.12)
    assert sampled(source, tmp_path, 300_000)[1] == read


def test_a_small_input_is_taken_whole(tmp_path):
    source = write_in(tmp_path / "in", "jsonl", stories(50))
    pieces, read, weights = sampled(source, tmp_path)
    assert len(pieces) == 1 and len(read) == 50 and (weights == 1).all()
    assert pieces[0].file.size == pieces[0].stands_for


def test_large_files_are_not_met_by_chance(tmp_path):
    """Among thousands of small files one that holds a third of all bytes is always there, and stands for itself alone."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2000):
        (folder / f"{number:04d}.py").write_text(f"small = {number}\n" * 60)
    (folder / "large.py").write_text("value = 1\n" * 90_000)
    _, read, weights = sampled(folder, tmp_path, 200_000)
    text = np.array([len(item.text) for item in read]) * weights
    large = np.array([item.source == "large.py" for item in read])
    assert 20 < len(read) < 200 and text[large].sum() == pytest.approx(900_000, rel=0.1)
    assert text.sum() == pytest.approx(list_source(str(folder)).num_bytes, rel=0.05)


def test_of_a_large_row_group_a_part_is_used(tmp_path):
    """It stands for all of it, so that a plan of a file with one row group takes no longer than others."""
    texts = stories(1500)
    (tmp_path / "in").mkdir()
    parquet.write_table(pa.table({"text": texts}), tmp_path / "in" / "rows.parquet", 10_000, compression="none")
    pieces, read, weights = sampled(tmp_path / "in", tmp_path, 2000)
    assert len(pieces) == 1 and len(read) < 1500
    assert (weights * [len(item.text) for item in read]).sum() == pytest.approx(sum(map(len, texts)), rel=0.01)


def test_broken_and_strange_files_are_no_reason_to_fail(tmp_path):
    folder = write_in(tmp_path / "in", "jsonl", stories(1000))
    (folder / "bad.jsonl.gz").write_bytes(gzip.compress(random.Random(0).randbytes(2_000_000))[:-1000])
    (folder / "bad.parquet").write_bytes(b"PAR1" * 500_000)
    (folder / "wide.txt").write_text("word " * 400_000, encoding="utf-16")
    (folder / "letters.txt").write_text("ö" * 3_000_000, encoding="utf8")
    _, read, _ = sampled(folder, tmp_path, max_document_chars=1000)
    texts = [item.text for item in read]
    assert {text.count("ö") for text in texts} >= {0, 1000} and any(text.startswith("word word") for text in texts)


def test_copies_in_a_sample_of_all_documents_are_counted_as_they_are(tmp_path):
    texts = stories(60, 240)
    write_rows(tmp_path / "in" / "rows.jsonl", texts + texts[:20])
    planned = Data.read({**SOUND, "source": str(tmp_path / "in"), "dedups": ["exact"]}).plan({}, None)
    kept = planned.estimates["kept_bytes"]
    assert kept.value == sum(len(text.encode()) for text in texts) and not kept.bound
    assert sum(split.documents for split in planned.facts.splits.values()) == pytest.approx(60, abs=1)


def test_of_an_input_that_is_sampled_whole_only_what_max_bytes_lets_in_is_counted(tmp_path):
    texts = stories(40) + ["short"] * 4000
    write_rows(tmp_path / "in" / "rows.jsonl", texts)
    write_rows(tmp_path / "in" / "unread.jsonl", stories(20, first=100))
    sizes = [len(text.encode()) for text in texts]
    spec = {**SOUND, "source": str(tmp_path / "in"), "max_bytes": sum(sizes[:1040])}
    planned = Data.read(spec).plan({}, None)
    kept = planned.estimates["kept_bytes"]
    assert kept.value == sum(sizes[:40]) and not kept.bound and "up to max_bytes" in kept.formula
    assert sum(split.documents for split in planned.facts.splits.values()) == pytest.approx(40, abs=1)


def skewed(folder: Path) -> Path:
    """One large file, sorted, and hundreds of tiny ones."""
    write_rows(folder / "large.jsonl", stories(1500) + stories(1500, 60, 5000))
    for number, text in enumerate(stories(800, 36, 10_000)):
        (folder / f"{number:04d}.md").write_text(text)
    return folder


def rare(folder: Path) -> Path:
    """A tenth is longer than the rest."""
    texts = stories(2700, 120) + stories(300, 400, 5000)
    write_rows(folder / "rows.jsonl", random.Random(1).sample(texts, len(texts)))
    return folder


def rare_in(folder: Path) -> Path:
    write_rows(folder / "in" / "rows.jsonl", stories(800))
    return folder / "in"


def twice(folder: Path) -> Path:
    texts = stories(2000, 240) * 2
    write_rows(folder / "rows.jsonl", random.Random(1).sample(texts, len(texts)))
    return folder


def beginning(folder: Path) -> Path:
    """What lies behind max_bytes is unlike what lies before."""
    write_rows(folder / "rows.jsonl", stories(3000, 240) + ["short"] * 100_000)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "spec"),
    [
        (skewed, SOUND),
        (rare, {**SOUND, "filters": [{"kind": "expression", "when": "True", "keep": "words > 200"}]}),
        (beginning, {**SOUND, "max_bytes": 2_000_000}),
    ],
)
def test_a_run_ends_within_the_tolerance_of_its_forecast(fill, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "SAMPLE_BYTES", 1_000_000)
    monkeypatch.setattr(forecast, "TOKEN_BYTES", 300_000)
    made = Data.read({"source": str(fill(tmp_path / "in")), **spec}).make(tmp_path / "out", run=Run(quiet=True))
    for name in ("kept_bytes", "train_tokens"):
        figure = made.figures[name]
        estimate = figure.estimate
        assert not estimate.bound and 0.01 <= estimate.tolerance < 0.5
        assert abs(figure.error) <= estimate.tolerance, f"{name}: {estimate}"
        assert "places" in estimate.formula and "standard error" in estimate.formula
    memory = made.figures["peak_memory_bytes"]
    assert 0.5 < memory.estimate.value / memory.value < 1.5
    assert made.figures["time_s"].estimate.value > 0


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{"dedups": ["exact"]}, {"edits": ["lines"]}], ids=["dedups", "edits"])
def test_what_is_not_foreseen_is_a_bound(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "SAMPLE_BYTES", 1_000_000)
    spec = {**SOUND, "source": str(twice(tmp_path / "in")), **steps}
    figure = Data.read(spec).make(tmp_path / "out", run=Run(quiet=True)).figures["kept_bytes"]
    assert figure.estimate.bound and figure.estimate.tolerance is None
    assert (
        figure.estimate.value > figure.value
        and "of copies and edits only what the sample repeats" in figure.estimate.formula
    )


def test_a_filter_that_names_no_column_is_said_before_anything_is_read(tmp_path):
    wrong = {"kind": "expression", "when": "True", "keep": "wrods > 200"}
    with pytest.raises(SpecError, match="wrods"):
        Data.read({"source": str(rare_in(tmp_path)), **SOUND, "filters": [wrong]}).plan({}, None)


@pytest.mark.slow
def test_facts_of_what_will_be_made(tmp_path):
    spec = Data.read({"source": str(rare_in(tmp_path)), **SOUND})
    planned, made = spec.plan({}, None), spec.make(tmp_path / "out", run=Run(quiet=True))
    facts = facts_of(made)
    assert planned.facts.splits["train"].tokens == pytest.approx(facts.splits["train"].tokens, rel=0.1)
    assert planned.facts.vocab_size == 400 >= facts.vocab_size  # asked for; so little text fills fewer
    assert planned.facts.eos_token_id == facts.eos_token_id
    assert not planned.facts.exact and planned.facts.tokenizer != facts.tokenizer
    assert planned.pace.estimate(4).value < planned.estimates["time_s"].value + planned.pace.started
    disk = made.figures["disk_bytes"]
    assert disk.error == pytest.approx(0, abs=0.25)
