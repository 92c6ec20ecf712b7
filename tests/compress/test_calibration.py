"""Calibration sequences are what the model sees when it is served, whatever the texts are kept in."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from hone.base.errors import MachineError, SpecError
from hone.compress.calibration import from_text
from hone.feed import plain
from hone.feed.files import remote
from hone.model.tokenizer import load_tokenizer
from tests.conftest import byte_tokenizer

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
STORIES = [f"Story {number}: " + "once there was a fox. " * (1 + number % 5) for number in range(80)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose texts begin with a token."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def read(source: Path | str, model: Path, **options: int):
    return from_text(source, model, **{"num_sequences": 10, "seq_len": 16, "seed": 0, "num_spare": 3, **options})


@pytest.mark.parametrize("begins", [True, False])
def test_every_sequence_begins_as_a_served_text_does(begins, model, tmp_path):
    if not begins:
        byte_tokenizer().save_pretrained(model)
    text = " ".join(f"{number} the fox" for number in range(300))
    (tmp_path / "text").write_text(text)
    served = load_tokenizer(model)
    assert served.start_ids == (served.eos_ids[:1] if begins else ())
    ids = served.encode(text, add_special_tokens=False)
    count = len(ids) // (16 - begins)
    found = read(tmp_path / "text", model, num_sequences=count)
    assert found.tokens.shape == (count, 16) and found.document_ids is None
    if begins:
        assert (found.tokens[:, 0] == served.start_ids[0]).all()
        assert found.tokens[0, :9].tolist() == served.encode(text)[:9]
    own = found.tokens[:, int(begins) :]
    assert np.array_equal(own.ravel(), ids[: own.size])


def _written(name: str, folder: Path) -> Path:
    """The stories in a file of this name."""
    path = folder / name
    if "parquet" in name:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": STORIES, "id": list(range(80))}), path)
        return path
    rows = [{"text": text, "id": 1} for text in STORIES]
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ".json" in path.suffixes and "array" in name:
        raw = json.dumps(rows, indent=1).encode()
    if name.endswith((".zst", ".zstd")):
        raw = pytest.importorskip("zstandard").compress(raw)
    packs = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    path.write_bytes(packs.get(path.suffix, gzip.compress if "packed" in name else bytes)(raw))
    return path


COMPRESSED = ["a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst", "a.jsonl.zstd"]
BY_CONTENT = ["packed", "packed.jsonl", "packed.txt", "5f3c-packed.bin", "parquet"]
"""Files whose names do not say what is in them, such as those of a cache."""


@pytest.mark.parametrize(
    "name", ["a.jsonl", *COMPRESSED, "a.json", "array.json", "array.json.gz", "a.parquet", *BY_CONTENT]
)
def test_rows_give_documents_that_attend_to_themselves(name, model, tmp_path):
    served = load_tokenizer(model)
    start = served.start_ids[0]
    found = read(_written(name, tmp_path), model)
    stories = [served.encode(text, add_special_tokens=False) for text in STORIES]
    windows = [ids[begin : begin + 15] for ids in stories for begin in range(0, len(ids), 15)]
    assert found.tokens.shape == (10, 16) and found.spare.tokens.shape == (3, 16)
    pieces = 0
    for tokens, ids in zip(found.tokens, found.document_ids, strict=True):
        for number in range(ids.max() + 1):
            first, *rest = tokens[ids == number].tolist()
            assert first == start and any(window[: len(rest)] == rest for window in windows)
            pieces += 1
    assert pieces > 10 and (np.diff(found.document_ids, axis=1) >= 0).all()
    again = read(_written(f"again-{name}", tmp_path), model)
    assert np.array_equal(again.tokens, found.tokens) and again.source == found.source
    assert not np.array_equal(read(tmp_path / name, model, seed=1).tokens, found.tokens)


def test_files_of_a_folder_are_documents(model, tmp_path):
    (tmp_path / "folder").mkdir()
    for number in range(40):
        (tmp_path / "folder" / f"{number}.md").write_text(f"note {number} about a fox and a dog")
    _written("folder/rows.jsonl.gz", tmp_path)
    (tmp_path / "folder" / "page.html").write_text("<p>not this</p>")
    found = read(tmp_path / "folder", model, num_sequences=100)
    said = load_tokenizer(model).decode(found.tokens.ravel().tolist())
    assert "about a fox" in said and "Story" in said and "not this" not in said
    assert plain.num_bytes(str(tmp_path / "folder"), "calibration_text") > 1000
    assert plain.num_bytes(str(tmp_path / "folder" / "*.md"), "calibration_text") < 3000
    assert (
        len(plain.local_files(str(tmp_path / "folder"), "calibration_text")) == 41
        and len(plain.local_files(str(tmp_path / "folder" / "*.md"), "calibration_text")) == 40
    )
    assert (
        plain.local_files(str(tmp_path / "nothing.txt"), "calibration_text")
        == plain.local_files("hf:owner/name", "calibration_text")
        == {}
    )


MESSAGES = [{"role": "user", "content": "Where is the fox?"}, {"role": "assistant", "content": "In its den."}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES},
        {
            "conversations": [
                {"from": "human", "value": "Where is the fox?"},
                {"from": "gpt", "value": "In its den."},
            ]
        },
    ],
)
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_conversations_are_written_by_the_models_own_template(row, name, model, tmp_path):
    (model / "chat_template.jinja").write_text(CHAT)
    if name.endswith(".parquet"):
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist([row] * 30), tmp_path / name)
    else:
        (tmp_path / name).write_text((json.dumps(row) + "\n") * 30)
    served = load_tokenizer(model)
    wanted = served.chat(MESSAGES, add_generation_prompt=False)
    assert wanted == "<user>Where is the fox?</user><assistant>In its den.</assistant>"
    ids = served.encode(wanted, add_special_tokens=False)
    found = read(tmp_path / name, model, num_sequences=5, seq_len=len(ids), num_spare=1)
    assert (found.tokens == np.array(ids)).all(), "no token before the template's own"
    assert (found.document_ids == 0).all()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("page", gzip.compress(b"<!doctype html><p>a story</p>", mtime=0), "page is html"),
        ("a.json", b'[{"body": "a story"}, {"body": "b", "id": 2}]', "no field text or messages, but body"),
        ("a.json", b'{"text": ["a", "b"]}', r'text is \["a", "b"\], which is no string'),
        ("a.json", b'[1, "text"]', "no JSON object"),
        ("a.json", b"a story", "no JSON: a story"),
        ("a.json", b"[]", "it is empty"),
        ("a.jsonl", b'{"text": null, "id": 1}\n', "text is null, which is no string"),
        ("a.html", b"<p>a story</p>", "a.html is html"),
        ("a.csv", b"text\na story\n", "a.csv is csv"),
        ("a.pdf", b"%PDF", "a.pdf is pdf"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a story"}\n' * 500, mtime=0)[:60],
            "a.jsonl.gz: Compressed file ended",
        ),
        ("a.jsonl", b'{"body": "a story"}\n', "no field text or messages, but body"),
        ("a.jsonl", b"a story\n", "no JSON: a story"),
        ("a.jsonl", b"", "it is empty"),
        ("a.parquet", b"no table", "a.parquet: no Parquet table"),
        ("a.jsonl", json.dumps({"messages": MESSAGES}).encode(), "this model has no chat template"),
        ("a.jsonl", b'{"text": "a story"}\n' * 9, "has 9 sequences of 8 tokens, num_sequences asks for 10"),
        ("a.txt", b"a story", "has 0 sequences of 16 tokens"),
    ],
)
def test_what_cannot_calibrate_is_an_error_with_a_way(name, content, message, model, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        read(path, model, **({"seq_len": 8} if "of 8 tokens" in message else {}))
    assert caught.value.fix


def test_rows_of_json_after_one_that_is_none_are_read(model, tmp_path):
    lines = [json.dumps({"text": text}) for text in STORIES]
    (tmp_path / "a.json").write_text("\ufeff" + "\n".join([*lines[:40], '{"text": "cut', *lines[40:]]))
    tokenizer = load_tokenizer(model)
    found = plain.read(str(tmp_path / "a.json"), "calibration_text", tokenizer, 1e9)
    assert found.documents == STORIES and len(found.notes) == 1 and 'no JSON: {"text": "cut' in found.notes[0]


def test_json_beside_other_texts_describes_them(model, tmp_path):
    tokenizer = load_tokenizer(model)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset_info.json").write_text('{"text": "about the set"}')
    assert plain.read(str(tmp_path / "set"), "calibration_text", tokenizer, 1e9).documents == ["about the set"]
    _written("set/rows.jsonl.gz", tmp_path)
    assert plain.read(str(tmp_path / "set"), "calibration_text", tokenizer, 1e9).documents == STORIES


def test_a_mark_before_a_text_is_none_of_it(model, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa story")
    found = plain.read(str(tmp_path / "a.txt"), "calibration_text", load_tokenizer(model), 1e9)
    assert found.documents == ["a story"]


def test_a_data_set_of_hone_goes_by_its_role(model, tmp_path):
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    (tmp_path / "data" / "tokens" / "meta.json").write_text("{}")
    with pytest.raises(SpecError, match="is a data set of hone") as caught:
        read(tmp_path / "data", model)
    assert caught.value.fix == f"give it as data: --from.data={tmp_path / 'data'}"


def test_a_data_set_of_the_hub_is_read_when_it_is_named(model, tmp_path, monkeypatch):
    """From a hub in memory; where it cannot be reached, that is one error with a way."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("huggingface_hub")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/datasets/me/stories/train.jsonl.gz", _written("rows.jsonl.gz", tmp_path).read_bytes())
    monkeypatch.setattr(remote, "_system", lambda url: (memory, "/" + url.partition("://")[2].removeprefix("/")))
    assert plain.num_bytes("hf:me/stories", "calibration_text") > 100
    found = read("hf:me/stories", model)
    assert np.array_equal(found.tokens, read(tmp_path / "rows.jsonl.gz", model).tokens)

    def lost(*arguments, **options):
        raise ConnectionError("the network is unreachable")

    for name in ("info", "find", "ls"):
        monkeypatch.setattr(memory, name, lost)
    with pytest.raises(MachineError, match=r"hf:me/stories cannot be reached: .*unreachable") as caught:
        read("hf:me/stories", model)
    assert "copy it to a local folder" in caught.value.fix


def test_rows_that_are_left_out_are_said(model, tmp_path):
    rows = [{"text": text} for text in STORIES] + [{"body": "x"}] * 7 + [{"text": "\ud800"}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = read(tmp_path / "a.jsonl", model).notes
    assert notes[0].startswith("7 rows of ") and notes[0].endswith("no field text or messages, but body")
    assert "2 rows" in notes[1] and "surrogate" in notes[1]


def test_a_file_in_another_encoding_is_left_out_by_name(model, tmp_path):
    """Among others; alone it is an error."""
    (tmp_path / "folder").mkdir()
    for number in range(40):
        (tmp_path / "folder" / f"{number}.md").write_text(f"note {number} about a fox and a dog")
    (tmp_path / "folder" / "old.txt").write_bytes("Straße, café".encode("latin-1"))
    (note,) = read(tmp_path / "folder", model).notes
    assert note.startswith("old.txt is left out: not UTF-8") and "give it as UTF-8" in note
    for one in (tmp_path / "folder").glob("*.md"):
        one.unlink()
    (tmp_path / "folder" / "older.txt").write_bytes("Köln".encode("latin-1"))
    with pytest.raises(SpecError, match=r"has no text: old.txt is left out: not UTF-8.*older.txt is left out"):
        read(tmp_path / "folder", model)
    (tmp_path / "folder" / "short.md").write_text("too short")
    with pytest.raises(SpecError, match=r"has 0 sequences of .* tokens.*; old.txt is left out: not UTF-8"):
        read(tmp_path / "folder", model)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_how_much_a_compressed_file_holds_is_estimated_from_its_beginning(pack, model, tmp_path):
    ending = {gzip.compress: "gz", bz2.compress: "bz2", lzma.compress: "xz"}[pack]
    raw = "".join(json.dumps({"text": text * 20}) + "\n" for text in STORIES).encode()
    (tmp_path / f"a.jsonl.{ending}").write_bytes(pack(raw))
    assert plain.num_bytes(str(tmp_path / f"a.jsonl.{ending}"), "calibration_text") == pytest.approx(len(raw))


def test_a_large_source_is_read_as_far_as_is_needed(model, tmp_path, monkeypatch):
    monkeypatch.setattr("hone.compress.calibration._LEAST_READ", 500)
    monkeypatch.setattr("hone.compress.calibration._READ", 2)
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in STORIES)
        file.write("this line is never parsed\n")
    (note,) = read(tmp_path / "a.jsonl", model).notes
    assert "drawn from the first 0.0 MB" in note


def test_conversations_and_texts_are_not_mixed(model, tmp_path):
    (model / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps({"text": "x"}) + "\n")
    with pytest.raises(SpecError, match="1 conversations and 1 texts"):
        read(tmp_path / "a.jsonl", model)


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "code.py", "paper.tex", "LICENSE", "server.log"])
def test_plain_text_is_read_whatever_it_is_called(name, model, tmp_path):
    (tmp_path / name).write_text("a story " * 100)
    assert plain.num_bytes(str(tmp_path / name), "calibration_text") == 800
    assert read(tmp_path / name, model).document_ids is None
