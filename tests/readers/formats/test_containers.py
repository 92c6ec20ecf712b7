"""Zip and tar files of any formats, files without an ending, and forced formats."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from hone.readers.documents import Document
from tests.readers.formats.written import items, noted, put, reasons, texts

PAGE = "<html><body><article><p>The page is about a river, and it is a long one indeed.</p></article></body></html>"


def members() -> dict[str, bytes]:
    table = io.BytesIO()
    parquet.write_table(pa.table({"text": ["from a table"]}), table)
    return {
        "a.txt": b"plain words",
        "in/b.jsonl": b'{"text": "row one"}\n{"text": "row two"}\n',
        "in/c.json.gz": gzip.compress(b'{"text": "row three"}\n'),
        "d.parquet": table.getvalue(),
        "e.html": PAGE.encode(),
        "f.csv": b"text,n\ncell,1\n",
        "g": b"no ending, but text",
        "h.png": b"\x89PNG",
        ".hidden.txt": b"no",
        "__MACOSX/a.txt": b"no",
        "../../up.py": b"x = 1\n",
    }


WANTED = ["plain words", "row one", "row two", "row three", "from a table"]


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        folder = tarfile.TarInfo("in")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return out.getvalue()


KINDS = {
    "a.zip": zipped,
    "stored.zip": lambda files: zipped(files, zipfile.ZIP_STORED),
    "xz.zip": lambda files: zipped(files, zipfile.ZIP_LZMA),
    "a.tar": tarred,
    "a.tar.gz": lambda files: gzip.compress(tarred(files)),
    "a.tgz": lambda files: gzip.compress(tarred(files)),
    "a.tar.bz2": lambda files: bz2.compress(tarred(files)),
    "a.tar.xz": lambda files: lzma.compress(tarred(files)),
    "a.tar.zst": lambda files: zstandard.compress(tarred(files)),
    "none": lambda files: gzip.compress(tarred(files)),
    "zip": zipped,
}


@pytest.mark.parametrize("name", KINDS)
def test_containers(tmp_path, name):
    path = put(tmp_path / name, KINDS[name](members()))
    found = [item for item in items(path) if isinstance(item, Document)]
    assert [item.text for item in found][:5] == WANTED
    assert [item.source for item in found][:2] == [f"{name}/a.txt", f"{name}/in/b.jsonl"]
    assert "river" in found[5].text and [item.text for item in found[6:8]] == ["cell", "no ending, but text"]
    assert found[8].kind == "code" and reasons(path) == []
    links = {"(no regular file)": 1} if "zip" not in name else {}
    assert noted(path) == {".png": 1, "(hidden)": 2, **links}
    assert len({item.id for item in found}) == len(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_a_zip_is_split_between_members(tmp_path):
    path = put(tmp_path / "a.zip", zipped({f"{n:03}.txt": b"word %d" % n for n in range(50)}))
    assert texts(path) == [f"word {n}" for n in range(50)]
    assert items(path) == items(path, part_bytes=2000)


def test_containers_inside_of_containers(tmp_path):
    inner = zipped({"deep.txt": b"deep"})
    path = put(tmp_path / "a.tar.gz", gzip.compress(tarred({"one.zip": inner, "b.txt": b"beside"})))
    assert texts(path) == ["deep", "beside"]
    content = inner
    for level in range(5):
        content = zipped({f"{level}.zip": content, f"{level}.txt": b"level %d" % level})
    path = put(tmp_path / "deep.zip", content)
    assert reasons(path) == ["nested_too_deeply"] and texts(path) == ["level 2", "level 3", "level 4"]


def test_broken_containers(tmp_path, monkeypatch):
    from hone.readers.formats import containers

    assert reasons(put(tmp_path / "a.zip", b"no zip")) == ["bad_zip"]
    assert reasons(put(tmp_path / "a.tar", b"no tar at all" * 99)) == ["bad_tar"]
    whole = zipped(members())
    assert reasons(put(tmp_path / "b.zip", whole[:-30])) == ["bad_zip"]
    cut = put(tmp_path / "b.tar", tarred(members())[:1540])
    assert texts(cut)[:1] == ["plain words"] and "truncated" in reasons(cut)
    cut = put(tmp_path / "b.tar.gz", gzip.compress(tarred(members()))[:-60])
    assert "plain words" in texts(cut) and "truncated" in reasons(cut)
    before = bytearray(whole)
    before[-6:-2] = (2**31).to_bytes(4, "little")  # where the index begins, as its end says
    assert set(reasons(put(tmp_path / "before.zip", bytes(before)))) == {"bad_zip"}
    damaged = tmp_path / "c.zip"
    damaged.write_bytes(
        zipped({"a.txt": b"stored words", "b.txt": b"good"}, 0).replace(b"stored words", b"other! words")
    )
    assert (texts(damaged), reasons(damaged)) == (["good"], ["bad_zip"])
    locked = bytearray(zipped({"a.txt": b"secret", "b.txt": b"good"}, 0))
    locked[6] |= 1
    locked[bytes(locked).index(b"PK\x01\x02") + 8] |= 1
    locked = put(tmp_path / "d.zip", bytes(locked))
    assert (texts(locked), reasons(locked)) == (["good"], ["encrypted"])
    monkeypatch.setattr(containers, "FREE_BYTES", 1 << 20)
    bomb = put(tmp_path / "e.zip", zipped({"a.txt": b"0" * (8 << 20), "b.txt": b"good"}))
    assert (texts(bomb), reasons(bomb)) == (["good"], ["expands_too_much"])


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"just text\n", "text"),
        (PAGE.encode(), "html"),
        (b"<?xml version='1.0'?><doc>x</doc>", "xml"),
        (b'{"text": "x"}\n', "json"),
        (b"[1, 2]", "json"),
        (b"[note] this is prose", "text"),
        (b"{curly} prose", "text"),
        (b"%PDF-1.7\n", "pdf"),
        (b"\\documentclass{article}\n\\begin{document}x", "tex"),
        (b"From me@x.org Mon Jan  1 00:00:00 2020\nSubject: x\n\nbody", "mbox"),
        (b"Received: from x\nFrom: me\nTo: you\nSubject: x\n\nbody", "eml"),
        (b"From: here it is\nplain prose\nand more\nof it", "text"),
        (b"WARC/1.0\r\n", "warc"),
        ("café".encode("utf-16"), "text"),
        (b"\x7fELF\x02\x01\x01\0\0\0", ""),
        (b"\x89PNG\r\n\x1a\n\0", ""),
        (b"", "text"),
    ],
)
def test_sniffing(content, wanted):
    from hone.feed.files.sniff import format_of

    assert format_of(content) == wanted


def test_files_without_an_ending(tmp_path):
    put(tmp_path / "README", "read me")
    put(tmp_path / "rows", zstandard.compress(b'{"text": "row"}\n'))
    put(tmp_path / "page", PAGE)
    put(tmp_path / "program", b"\x7fELF\0\0\0\x01\x02")
    put(tmp_path / "empty", b"")
    assert sorted(texts(tmp_path))[1:] == ["read me", "row"] and "river" in sorted(texts(tmp_path))[0]
    assert noted(tmp_path) == {"(no ending)": 1} and reasons(tmp_path) == ["empty"]


def test_a_format_can_be_forced(tmp_path):
    put(tmp_path / "a.dat", '{"text": "row"}\n')
    put(tmp_path / "b.txt.gz", gzip.compress(b'{"text": "packed"}\n'))
    put(tmp_path / "c.zip", zipped({"x.bin": json.dumps({"text": "inside"}).encode()}))
    assert texts(tmp_path, format="jsonl") == ["row", "packed", "inside"]
    assert reasons(tmp_path, format="parquet") == ["bad_parquet"] * 3
