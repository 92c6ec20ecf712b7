"""Formats: reading the same prose from each format, in megabytes of text per second of one core.

    python -m benchmarks.data formats --data FOLDER --peers INTERPRETER_WITH_pdfminer

Speeds are of process CPU time of one thread, best of three, with the checks of every text and the documents' ids. A peer
reads the same file unchecked. PDF files are those of FOLDER/unseen (benchmarks/data/unseen.py), manuals of Debian packages.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pyarrow as pa
import zstandard
from pyarrow import feather

from benchmarks.data.clock import best_of
from benchmarks.data.corpus import corpus
from hone.feed.files.listing import list_source
from hone.readers.documents import Batch, Options, settle
from hone.readers.read import read_batches

_ROUNDS = 3
_PDFMINER = """
import sys, time
from pdfminer.high_level import extract_text
begun = time.process_time()
for path in sys.argv[1:]:
    extract_text(path)
print(time.process_time() - begun)
"""


def written(folder: Path, texts: list[str]) -> dict[str, Path]:
    """The texts in each format, one file each."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    table = io.StringIO()
    csv.writer(table).writerows([["text"], *([text] for text in texts)])
    plain = [escape("".join(c for c in text if c >= " " or c in "\n\t")) for text in texts]
    pages = "".join(f"<page><title>t</title><ns>0</ns><text>{text}</text></page>" for text in plain)
    cells = [{"cell_type": "markdown", "source": text} for text in texts]
    mails = "".join(f"From a@b Mon Jan  1 00:00:00 2020\nSubject: s\n\n{text}\n\n" for text in texts)
    paragraphs = [f"<w:p><w:r><w:t>{line}</w:t></w:r></w:p>" for text in plain for line in text.split("\n")]
    word = io.BytesIO()
    with zipfile.ZipFile(word, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "word/document.xml", f"<w:document xmlns:w='w'><w:body>{''.join(paragraphs)}</w:body></w:document>"
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.txt", text)
    taken = io.BytesIO()
    with tarfile.open(fileobj=taken, mode="w") as archive:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(raw := text.encode())
            archive.addfile(info, io.BytesIO(raw))
    files: dict[str, bytes] = {
        "a.json": json.dumps([{"text": text} for text in texts], ensure_ascii=False, indent=1).encode(),
        "a.json.gz": gzip.compress(lines),
        "a.jsonl": lines,
        "a.jsonl.bz2": bz2.compress(lines),
        "a.jsonl.xz": lzma.compress(lines, preset=1),
        "a.jsonl.zst": zstandard.compress(lines),
        "a.csv": table.getvalue().encode(),
        "a.xml": f"<mediawiki>{pages}</mediawiki>".encode(),
        "a.ipynb": json.dumps({"nbformat": 4, "cells": cells}).encode(),
        "a.tex": f"\\documentclass{{a}}\\begin{{document}}{' '.join(texts)[: 16 << 20]}\\end{{document}}".encode(),
        "a.mbox": mails.encode("utf8", "replace"),
        "a.docx": word.getvalue(),
        "a.zip": packed.getvalue(),
        "a.tar.zst": zstandard.compress(taken.getvalue()),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    feather.write_feather(pa.table({"text": texts}), folder / "a.arrow", compression="zstd")
    return {name: folder / name for name in [*files, "a.arrow"]}


def read(paths: list[Path]) -> int:
    """Bytes of the documents in files."""
    return sum(
        item.texts.num_bytes
        for path in paths
        for file in list_source(str(path)).files
        for item in read_batches(file, Options())
        if isinstance(item, Batch)
    )


def rows(data: Path, peers: str | None = None, megabytes: float = 10) -> list[dict[str, Any]]:
    """The rows of this benchmark; `peers` is an interpreter that has pdfminer.six."""
    texts = [text for reason, text in map(settle, corpus(data, megabytes)) if not reason]
    result: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for kind, path in written(Path(name), texts).items():
            seconds, size = best_of(_ROUNDS, lambda path=path: read([path]))
            result.append(
                {
                    "figure": f"read {kind[1:]}",
                    "value": size / 1e6 / seconds,
                    "unit": "MB of text/s per core",
                    "n": len(texts),
                }
            )
    manuals = sorted((data / "unseen").rglob("*.pdf"))
    if manuals:
        seconds, size = best_of(_ROUNDS, lambda: read(manuals))
        row: dict[str, Any] = {
            "figure": "read .pdf",
            "value": size / 1e6 / seconds,
            "unit": "MB of text/s per core",
            "n": len(manuals),
        }
        done = peers and subprocess.run(
            [peers, "-c", _PDFMINER, *map(str, manuals)], capture_output=True, text=True, timeout=600
        )
        if done and not done.returncode:
            theirs = size / 1e6 / float(done.stdout)
            row |= {"peer": "pdfminer.six", "peer_value": theirs, "ratio": row["value"] / theirs}
        result.append(row)
    return result
