"""Reading: Parquet, jsonl and WARC to documents, beside Arrow, json, orjson, fastwarc and warcio on the same files.

    python -m benchmarks.data reading --data FOLDER --peers INTERPRETER_WITH_orjson,warcio

Speeds are megabytes of text (Parquet, jsonl) or of records (WARC) per second of process CPU time of one thread, best of
three. hone's include the checks of every text (UTF-8, NFC, NUL, mojibake, line ends) and the documents' ids.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from benchmarks.data.clock import best_of
from benchmarks.data.corpus import corpus
from benchmarks.data.pages import gold
from hone.feed.files.listing import File
from hone.readers.documents import Batch, Document, Options, settle
from hone.readers.encodings import decode_page
from hone.readers.pages import Extractor
from hone.readers.read import read_batches, read_file

_ROUNDS = 3
_PEERS = {
    "orjson": """
import orjson
def run(path):
    with open(path, "rb") as file:
        return sum(len(orjson.loads(line)["text"]) for line in file)
""",
    "warcio": """
from warcio.archiveiterator import ArchiveIterator
def run(path):
    with open(path, "rb") as file:
        return sum(len(record.content_stream().read()) for record in ArchiveIterator(file))
""",
}
_TIMED = """
import sys, time
best = float("inf")
for _ in range(3):
    begun = time.process_time()
    run(sys.argv[1])
    best = min(best, time.process_time() - begun)
print(best)
"""


class Top(Extractor):
    """The beginning of the page, to measure reading alone."""

    def extract(self, page: str) -> str:
        return page[:100]


def best(call: Callable[[], Any]) -> float:
    """Least CPU seconds of three rounds."""
    return best_of(_ROUNDS, call)[0]


def batches(file: File, options: Options | None = None) -> int:
    """Texts of `file` in batches."""
    return sum(item.texts.num_texts for item in read_batches(file, options or Options()) if isinstance(item, Batch))


def documents(file: File, options: Options | None = None) -> int:
    """Documents of `file` one by one."""
    return sum(isinstance(item, Document) for item in read_file(file, options or Options()))


def warc_of(pages: dict[str, bytes]) -> list[bytes]:
    """The pages as response records."""
    out = []
    for number, (name, raw) in enumerate(pages.items()):
        block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.org/{name}\r\nWARC-Date: 2020-01-01T00:00:00Z\r\n"
            f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-{number:012d}>\r\n"
            f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
        )
        out.append(head.encode() + block + b"\r\n\r\n")
    return out


def peer_seconds(peers: str | None, name: str, path: Path) -> float | None:
    """Best seconds of the peer on the file; None when there is none."""
    if not peers:
        return None
    done = subprocess.run([peers, "-c", _PEERS[name] + _TIMED, str(path)], capture_output=True, text=True)
    return None if done.returncode else float(done.stdout)


def rows(data: Path, peers: str | None = None, megabytes: float = 60) -> list[dict[str, Any]]:
    """The rows of this benchmark; `peers` is an interpreter that has orjson and warcio."""
    texts = [text for reason, text in map(settle, corpus(data, megabytes)) if not reason]
    urls = [f"https://example.org/{number}" for number in range(len(texts))]
    size = sum(len(text.encode()) for text in texts) / 1e6
    result: list[dict[str, Any]] = []

    def row(
        figure: str,
        seconds: float,
        peer: str = "",
        theirs: float | None = None,
        megabytes: float = size,
        n: int = len(texts),
    ):
        value = megabytes / seconds
        line: dict[str, Any] = {"figure": f"read {figure}", "value": value, "unit": "MB/s per core", "n": n}
        if theirs:
            line |= {"peer": peer, "peer_value": megabytes / theirs, "ratio": value * theirs / megabytes}
        result.append(line)

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.parquet"
        parquet.write_table(pa.table({"text": texts, "url": urls}), path, compression="zstd")
        file = File(path, path.name, path.stat().st_size, "parquet")
        assert batches(file) == documents(file) == len(texts)
        seconds = best(lambda: batches(file, Options(url_field="")))
        row(
            "Parquet, batches",
            seconds,
            "pyarrow, unchecked",
            best(lambda: parquet.read_table(path, columns=["text"], use_threads=False)),
        )
        row("Parquet, batches with addresses", best(lambda: batches(file)))
        row(
            "Parquet, documents",
            best(lambda: documents(file)),
            "pyarrow to_pylist, unchecked",
            best(lambda: parquet.read_table(path, columns=["text"], use_threads=False).column(0).to_pylist()),
        )

        path = Path(name) / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text, "url": url}) + "\n" for text, url in zip(texts, urls)))
        jsonl = File(path, path.name, path.stat().st_size, "jsonl")
        assert batches(jsonl) == len(texts)
        seconds = best(lambda: batches(jsonl))

        def by_json() -> int:
            with open(jsonl.path, "rb") as lines:
                return sum(len(json.loads(line)["text"]) for line in lines)

        row("jsonl, batches", seconds, "json, unchecked", best(by_json))
        row("jsonl, batches", seconds, "orjson, unchecked", peer_seconds(peers, "orjson", path))
        row("jsonl, documents", best(lambda: documents(jsonl)))

        pages = {name: raw for name, raw in gold(data)[0].items() if not settle(decode_page(raw)[:100])[0]}
        records = warc_of(pages)
        raw = b"".join(records)
        for ending, content in ((".warc", raw), (".warc.gz", b"".join(map(gzip.compress, records)))):
            path = Path(name) / f"a{ending}"
            path.write_bytes(content)
            warc = File(path, path.name, len(content), "warc", ".gz" if ending.endswith("gz") else "")
            options = Options(extractor=Top())
            assert documents(warc, options) == len(pages)
            seconds = best(lambda warc=warc, options=options: documents(warc, options))
            figure = f"{ending}, pages decoded, without extraction"
            row(figure, seconds, "warcio, undecoded", peer_seconds(peers, "warcio", path), len(raw) / 1e6, len(pages))
            row(
                figure,
                seconds,
                "fastwarc, undecoded",
                best(lambda path=path: by_fastwarc(path)),
                len(raw) / 1e6,
                len(pages),
            )
    return result


def by_fastwarc(path: Path) -> int:
    """Bytes of all records."""
    from fastwarc.warc import ArchiveIterator

    with open(path, "rb") as file:
        return sum(len(record.reader.read()) for record in ArchiveIterator(file))
