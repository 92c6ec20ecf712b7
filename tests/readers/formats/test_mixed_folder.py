"""A folder of forty files in mixed formats goes through the whole stage; one line says what of it was not read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import mailbox
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import feather, parquet

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.data.stage import Data
from hone.feed.files.listing import list_source
from hone.readers.documents import Broken, Document, Noted, Options
from hone.readers.read import read_file
from tests.readers.formats.made import docx, epub, odt, pdf, zipped
from tests.readers.formats.written import put

TOPICS = [
    "river",
    "bridge",
    "harbour",
    "garden",
    "market",
    "school",
    "forest",
    "castle",
    "winter",
    "kitchen",
    "library",
    "station",
    "mountain",
    "village",
    "factory",
]


def prose(seed: int, sentences: int = 12) -> str:
    """Sentences that differ from those of every other seed."""
    made = []
    for n in range(sentences):
        a, b, c = (TOPICS[(seed * k + n * m) % len(TOPICS)] for k, m in ((1, 3), (2, 5), (4, 7)))
        made.append(
            f"In the {a} number {seed * 100 + n} they found the old {b}, and later the {c} was open to everyone."
        )
    return " ".join(made)


def tarred(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def paragraphs(seed: int) -> list[tuple[float, float, str]]:
    return [(50.0, 750.0 - 14 * n, line) for n, line in enumerate(prose(seed).split(". "))]


def forty(folder: Path) -> int:
    """Writes forty files in every format, six of them not to be read; returns how many documents are in them."""
    seeds = iter(range(1, 1000))
    text = lambda: prose(next(seeds))  # noqa: E731
    row = lambda: json.dumps({"text": text()})  # noqa: E731
    page = lambda: f"<html><body><article><p>{text()}</p></article></body></html>"  # noqa: E731
    warc = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page().encode()
    head = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {}\r\nWARC-Date: 2020-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:{}>\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
    dns = b"20200101000000\nexample.org. 300 IN A 127.0.0.1\n"
    records = head.format("dns:example.org", "a", "text/dns", len(dns)).encode() + dns + b"\r\n\r\n"
    records += (
        head.format("http://example.org/", "b", "application/http; msgtype=response", len(warc)).encode()
        + warc
        + b"\r\n\r\n"
    )
    mail = f"Received: from x\nFrom: a@example.org\nTo: b@example.org\nSubject: Plans\n\n{text()}\n"
    wiki = f"<mediawiki><page><title>X</title><ns>0</ns><text>'''Bold''' {text()} {{{{t}}}}</text></page></mediawiki>"
    chat = json.dumps({"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]})
    book = json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown", "source": text()}]})
    files: dict[str, str | bytes] = {
        "a.txt": text(), "b.md": text(), "c.rst": text(), "d.html": page(), "e.jsonl": row(), "f.json": json.dumps([{"text": text()}]),
        "g.json.gz": gzip.compress(f"{row()}\n{row()}\n".encode()), "h.jsonl.xz": lzma.compress(row().encode()),
        "i.jsonl.bz2": bz2.compress(row().encode()), "j.jsonl.zstd": zstandard.compress(row().encode()),
        "k.jsonl.zst": zstandard.compress(row().encode()), "l.txt.gz": gzip.compress(text().encode()),
        "m.csv": f'id,text\n1,"{text()}"\n', "n.tsv": f"id\ttext\n1\t{text()}\n", "o.xml": f"<doc><p>{text()}</p></doc>",
        "p.xml.bz2": bz2.compress(wiki.encode()), "q.ipynb": book, "r.tex": f"\\documentclass{{a}}\\begin{{document}}{text()}\\end{{document}}",
        "s.eml": mail, "t.docx": docx(f"<w:p><w:r><w:t>{text()}</w:t></w:r></w:p>"), "u.odt": odt(f"<text:p>{text()}</text:p>"),
        "v.epub": epub({"one": f"<p>{text()}</p>"}), "w.pdf": pdf([paragraphs(next(seeds))]),
        "x.zip": zipped({"in/a.txt": text(), "in/b.jsonl": row(), "in/c.gif": b"GIF89a"}),
        "y.tar.gz": gzip.compress(tarred({"a.txt": text().encode(), "b.html": page().encode()})), "z.tar.zst": zstandard.compress(tarred({"a.md": text().encode()})),
        "aa.warc": records, "ab.jsonl": chat, "ac": text(), "ad": row(), "ae.py": f'"""{text()}"""\n',
        "z1.png": b"\x89PNG\r\n", "z2.exe": b"MZ\0", "z3.exe": b"MZ\0", ".hidden.txt": "no", "program": b"\x7fELF\0\0\1", "scan.pdf": pdf([[]]),
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    table = pa.table({"text": [text(), text()]})
    parquet.write_table(table, folder / "af.parquet")
    feather.write_feather(pa.table({"text": [text()]}), folder / "ag.arrow")
    box = mailbox.mbox(folder / "ah.mbox")
    box.add(mailbox.mboxMessage(f"Subject: Letters\n\n{text()}\n".encode()))
    box.close()
    return 40


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_forty_files_of_mixed_formats(tmp_path, executor, capsys):
    pytest.importorskip("pypdfium2")
    folder = tmp_path / "mixed"
    folder.mkdir()
    assert forty(folder) == len(list(folder.iterdir()))
    spec = Data(source=str(folder), dedups=(), filters=(), tokenizer={"vocab_size": 300})
    artifact = spec.make(tmp_path / "out", run=Run(executor={"kind": executor}))
    step = json.loads((artifact.folder / "stats.json").read_text())["steps"][0]
    assert step["documents_out"] == 38
    assert step["reasons"] == {"no_text_layer": {"documents": 1, "bytes": (folder / "scan.pdf").stat().st_size}}
    assert step["skipped"] == {"(hidden)": 1, "(no ending)": 1, ".exe": 2, ".gif": 1, ".png": 1, "dns: record": 1}
    (said,) = [line for line in capsys.readouterr().err.split("\n") if "skipped" in line]
    assert said.startswith(
        "set aside 1 of 39 documents: 1 no_text_layer (see dropped.jsonl); skipped 7 files or records of other kinds: 2 .exe"
    )
    for kind in step["skipped"]:
        assert kind in said


def test_a_run_that_finds_nothing_names_the_file_and_leaves_nothing(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(SpecError) as caught:
        Data(source=str(tmp_path / "in")).make(tmp_path / "out")
    assert "the first is a.txt: wrong_encoding" in str(caught.value) and "encoding=auto" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_texts_in_another_encoding_are_hinted_at(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "in" / "b.txt").write_text(prose(1))
    (tmp_path / "in" / "c.txt").write_text(prose(2).replace(" old", "\0 old", 1))
    spec = Data(source=str(tmp_path / "in"), filters=(), dedups=(), tokenizer={"vocab_size": 300})
    artifact = spec.make(tmp_path / "out")
    assert "try --encoding=auto" in capsys.readouterr().err
    step = json.loads((artifact.folder / "stats.json").read_text())["steps"][0]
    assert step["repaired"] == {"NUL characters removed": 1} and step["documents_out"] == 2


def test_damaged_files_never_stop_the_reading(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    forty(whole)
    rng = random.Random(14)
    names = sorted(path for path in whole.iterdir() if path.suffix not in (".png", ".exe", ".txt", ".md", ".rst"))
    for number in range(300):
        path = rng.choice(names)
        raw = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 3, 9])):
            at = rng.randrange(len(raw))
            how = rng.randrange(3)
            if how == 0:
                raw[at] = rng.randrange(256)
            elif how == 1:
                raw[at : at + 9] = rng.randbytes(5)
            elif at:
                del raw[at:]
        damaged = put(tmp_path / "damaged" / path.name, bytes(raw))
        for file in list_source(str(damaged)).files:
            assert all(isinstance(item, Document | Broken | Noted) for item in read_file(file, Options())), number
        damaged.unlink()
