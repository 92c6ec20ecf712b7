"""Readers take every format, and set broken input aside with its reason instead of stopping."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from hone.base.errors import MissingExtra, SpecError
from hone.feed.files.listing import File, list_source
from hone.readers import read as read_module
from hone.readers.documents import Broken, Document, Options
from hone.readers.pages import Extractor
from hone.readers.read import read_batches, read_file

TEXT = "Once upon a time there was a reader.\nIt read."


def items(path: Path, **options) -> list[Document | Broken]:
    listing = list_source(str(path))
    return [item for file in listing.files for item in read_file(file, Options(**options))]


def texts(path: Path, **options) -> list[str]:
    return [item.text for item in items(path, **options) if isinstance(item, Document)]


def reasons(path: Path, **options) -> list[str]:
    return [item.reason for item in items(path, **options) if isinstance(item, Broken)]


def put(path: Path, content: bytes) -> Path:
    """Writes `content`, compressed as the name says."""
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        import zstandard

        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst", "A.TXT", "a.txt.gz", "a.txt.zst", "a.md.zst"])
def test_text(tmp_path, name):
    assert texts(put(tmp_path / name, TEXT.replace("\n", "\r\n").encode())) == [TEXT]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_byte_order_marks(tmp_path, encoding):
    raw = TEXT.encode(encoding)
    assert texts(put(tmp_path / "a.txt", (b"\xff\xfe" if encoding == "utf-16-le" else b"") + raw)) == [TEXT]


def test_text_is_parted_at_the_end_of_text_mark_and_cut_when_long(tmp_path):
    assert texts(put(tmp_path / "a.txt", b"one<|endoftext|>\n two\n<|endoftext|>")) == ["one", " two"]
    long = "\n\n".join(f"paragraph {number} of a long book" for number in range(10_000))
    parts = texts(put(tmp_path / "a.txt", long.encode()), max_document_chars=50_000)
    assert "\n\n".join(parts) == long and max(map(len, parts)) <= 50_000 and len(parts) < 9
    solid = texts(put(tmp_path / "a.txt", b"x" * 3_000_000), max_document_chars=1_000_000)
    assert [len(part) for part in solid] == [1_000_000] * 3


def test_python_sources(tmp_path):
    path = put(tmp_path / "a.py", "# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (document,) = items(path)
    assert document.kind == "code" and "é" in document.text
    assert reasons(put(tmp_path / "a.py", b"# coding: nonsense\n")) == ["wrong_encoding"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"])
def test_jsonl_keeps_good_rows_among_bad_ones(tmp_path, name):
    good = [json.dumps({"text": f"row {number}", "n": number}) for number in range(3)]
    bad = ['{"text": "broken', "[1, 2]", '{"other": "x"}', '{"text": 3}', "", "[" * 100_000, '{"text": "\\ud800"}']
    content = "\n".join([good[0], *bad, good[1]]).encode() + b'\n{"text": "\xff"}\n' + good[2].encode()
    path = put(tmp_path / name, content)
    assert texts(path) == ["row 0", "row 1", "row 2"]
    assert sorted(reasons(path)) == sorted(
        ["bad_json", "no_text_field", "no_text_field", "no_text_field", "bad_json", "lone_surrogate", "wrong_encoding"]
    )
    assert texts(put(tmp_path / name, b'{"content": "x"}'), text_field="content") == ["x"]


def test_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", None, "three"], "n": [1, 2, 3]}), path)
    assert texts(path) == ["one", "three"] and reasons(path) == ["no_text_field"]
    (broken,) = items(path, text_field="body")
    assert (broken.reason, broken.text) == ("no_text_field", "columns: text, n")
    path.write_bytes(path.read_bytes()[:-20])
    assert reasons(path) == ["bad_parquet"]


def test_html(tmp_path):
    page = "<html><head><meta charset='latin-1'><title>t</title><script>x()</script></head><body><p>Grüße an alle.</p></body>"
    assert texts(put(tmp_path / "a.html", page.encode("latin-1"))) == ["Grüße an alle."]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n\t ", "empty"),
        ("a.txt", "café".encode("latin-1"), "wrong_encoding"),
        ("a.txt", bytes(range(256)) * 10, "wrong_encoding"),
        ("a.txt", b"a\0b\0", "binary"),
        ("a.txt.gz", b"no gzip at all", "bad_compression"),
        ("a.txt.zst", b"no zstd at all", "bad_compression"),
        ("a.txt.gz", gzip.compress(TEXT.encode(), mtime=0)[:11], "truncated"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:14], "truncated"),
        ("a.warc", b"no archive", "bad_archive"),
        ("a.parquet", b"PAR1", "bad_parquet"),
        ("a.html", b"", "empty"),
        ("a.jsonl", b"\n\n", "empty"),
    ],
)
def test_broken_files_are_set_aside(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    assert texts(path) == []
    assert reasons(path) == [reason]


def test_truncated_zstd_is_noticed(tmp_path):
    import zstandard

    rows = b"".join(b'{"text": "row %d"}\n' % number for number in range(50_000))
    whole = zstandard.compress(rows)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(whole[: len(whole) // 2])
    assert reasons(path)[-1] == "truncated"
    path.write_bytes(zstandard.compress(b'{"text": "one"}\n') + zstandard.compress(b'{"text": "two"}\n'))
    assert texts(path) == ["one", "two"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_rows_before_a_break_are_kept(tmp_path, ending):
    import zstandard

    draw = random.Random(0)
    rows = [f"row {number} of {draw.random()}" for number in range(30_000)]
    lines = b"".join(b'{"text": "%s"}\n' % row.encode() for row in rows)
    path = tmp_path / f"a.jsonl{ending}"
    whole = gzip.compress(lines) if ending == ".gz" else zstandard.compress(lines)
    path.write_bytes(whole[: len(whole) // 2])
    found = texts(path)
    assert found == rows[: len(found)]
    assert len(found) > 10_000
    assert reasons(path) == ["truncated"]
    path.write_bytes(whole[: len(whole) // 2] + bytes(9000))
    assert reasons(path)[-1] in ("truncated", "bad_compression")


def test_latin1_can_be_asked_for(tmp_path):
    assert texts(put(tmp_path / "a.txt", "café".encode("latin-1")), encoding="latin-1") == ["café"]


def test_listing_is_sorted_and_survives_links_pipes_and_odd_names(tmp_path):
    (tmp_path / "b").mkdir()
    put(tmp_path / "b" / "z.txt", b"z")
    put(tmp_path / "b" / "a.txt", b"a")
    put(tmp_path / "c.xyz", b"?")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    put(tmp_path / ".hidden.txt", b"no")
    put(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")), b"odd")
    listing = list_source(str(tmp_path))
    assert [file.name for file in listing.files] == ["b/a.txt", "b/z.txt", "\ufffd.txt"]
    assert listing.broken == [("dangling.txt", "dangling_link")]
    assert listing.skipped == {".xyz": 1, "(no regular file)": 1, "(hidden)": 1}


def test_no_permission(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "no")

    path = put(tmp_path / "a.txt", b"x")
    monkeypatch.setattr("builtins.open", refuse)
    assert [item.reason for item in read_file(File(path, "a.txt", 1, "text"), Options())] == ["no_permission"]


class PanicException(BaseException):
    """Named like what a panic in Rust becomes."""


class Fragile(Extractor):
    """Breaks at pages that say so."""

    def extract(self, page):
        if "poison" in page:
            raise {"panic": PanicException, "stop": KeyboardInterrupt}.get(page.split()[-1], RuntimeError)("cannot")
        return page


@pytest.mark.parametrize(("kind", "reason"), [("error", "failed_RuntimeError"), ("panic", "failed_PanicException")])
def test_a_poison_page_is_set_aside_alone(tmp_path, kind, reason):
    for name in ("a", f"poison {kind}", "z"):
        put(tmp_path / f"{name}.html", name.encode())
    assert texts(tmp_path, extractor=Fragile()) == ["a", "z"]
    assert reasons(tmp_path, extractor=Fragile()) == [reason]


def test_an_interrupt_is_no_poison(tmp_path):
    put(tmp_path / "a.html", b"poison stop")
    with pytest.raises(KeyboardInterrupt):
        texts(tmp_path, extractor=Fragile())


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(SpecError, match="there is no such file"):
        list_source(str(tmp_path / "missing"))
    put(tmp_path / "a.xyz", b"?")
    with pytest.raises(SpecError, match=r"skipped: 1 \.xyz"):
        list_source(str(tmp_path))


def test_ids_depend_on_relative_names_only(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        put(tmp_path / folder / "a.jsonl", b'{"text": "x"}\n{"text": "x"}\n')
    one, two = ([item.id for item in items(tmp_path / folder)] for folder in ("one", "two"))
    assert one == two and len(set(one)) == 2


def test_python_library_is_prose_and_code():
    listing = list_source("python")
    file = next(file for file in listing.files if file.name == "json/__init__.py")
    prose, code = read_file(file, Options())
    assert (prose.kind, code.kind) == ("prose", "code") and prose.family == code.family
    assert "dumps(obj, *, skipkeys=False" in prose.text and "def dumps" in code.text
    assert not any("site-packages" in file.name or "/test" in file.name for file in listing.files)


def test_a_reader_without_its_package_names_the_file_and_the_package(tmp_path, monkeypatch):
    """A module that is not there is no fault of the file: it would be that of every file."""

    def absent(file, options):
        import no_such_package.inner  # noqa: F401

    monkeypatch.setitem(read_module._READERS, "text", "tests.readers.test_read:absent")
    monkeypatch.setattr("tests.readers.test_read.absent", absent, raising=False)
    (tmp_path / "a.txt").write_text("some text")
    (file,) = list_source(str(tmp_path)).files
    for items in (read_file, read_batches):
        with pytest.raises(MissingExtra, match=r"reading a.txt as text needs the package 'no_such_package'"):
            list(items(file, Options()))
