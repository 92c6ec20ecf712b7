"""HTML: F1 and speed of the extractors on 181 pages with gold articles, beside plain calls of trafilatura and resiliparse.

    python -m benchmarks.data pages --data FOLDER --peers INTERPRETER_WITH_trafilatura

F1 is the article extraction benchmark's: mean precision and recall of 4-word shingles a page. Speed is megabytes of HTML
per second of process CPU time of one thread, decoding included, best of three (twice for the slow ones).
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.data.clock import best_of
from hone.readers.encodings import decode_page
from hone.readers.pages import Careful, Fast, page_text

# The call of FineWeb's pipeline, with the trafilatura of the other interpreter.
_PEER = """
import json, sys, time, trafilatura
pages = json.load(open(sys.argv[1]))
found, begun = {}, time.process_time()
for name, page in pages.items():
    found[name] = trafilatura.extract(page, favor_precision=True, include_comments=False, deduplicate=False) or ""
print(json.dumps({"version": trafilatura.__version__, "seconds": time.process_time() - begun, "found": found}))
"""


@cache
def gold(folder: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """({page: HTML}, {page: article}) of the article extraction benchmark."""
    with tarfile.open(folder / "web" / "article-extraction-benchmark.tar") as archive:
        articles = json.load(archive.extractfile("ground-truth.json"))  # type: ignore[arg-type]
        pages = {
            Path(name).name[: -len(".html.gz")]: gzip.decompress(archive.extractfile(name).read())  # type: ignore[union-attr]
            for name in sorted(archive.getnames())
            if name.endswith(".html.gz")
        }
    return pages, {name: row["articleBody"] for name, row in articles.items()}


def shingles(text: str) -> Counter:
    """4-word shingles with their counts."""
    words = re.findall(r"\w+", text)
    if len(words) < 4:
        return Counter([tuple(words)] if words else [])
    return Counter(tuple(words[i : i + 4]) for i in range(len(words) - 3))


def score(found: dict[str, str], wanted: dict[str, str]) -> tuple[float, float, float]:
    """(F1, precision, recall): the benchmark's metric, the means over pages of precision and recall in 4-word shingles."""
    precision = recall = 0.0
    for name, article in wanted.items():
        mine, theirs = shingles(found[name]), shingles(article)
        hits, extra, missed = (sum(part.values()) for part in (mine & theirs, mine - theirs, theirs - mine))
        precision += hits / (hits + extra) if hits + extra else float(not missed)
        recall += hits / (hits + missed) if hits + missed else float(not extra)
    precision, recall = precision / len(wanted), recall / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall


def plain_calls() -> dict[str, Callable[[bytes], str]]:
    """The libraries as their documentation calls them."""
    import trafilatura
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    return {
        "trafilatura": lambda raw: trafilatura.extract(raw) or "",
        "trafilatura, fast=True": lambda raw: trafilatura.extract(raw, fast=True) or "",
        "resiliparse, main_content": lambda raw: extract_plain_text(
            HTMLTree.parse(decode_page(raw)), main_content=True
        ),
    }


def measured(call: Callable[[bytes], str], pages: dict[str, bytes], rounds: int) -> tuple[dict[str, str], float]:
    """(text of each page, best seconds of CPU time for all)."""
    best, found = best_of(rounds, lambda: {name: call(raw) for name, raw in pages.items()})
    return found, best


def rows(data: Path, peers: str | None = None) -> list[dict[str, Any]]:
    """The rows of this benchmark; `peers` is an interpreter with the trafilatura that datatrove pins."""
    pages, articles = gold(data)
    size = sum(map(len, pages.values())) / 1e6
    others: dict[str, tuple[float, float]] = {}
    for name, call in plain_calls().items():
        found, seconds = measured(call, pages, 2)
        others[name] = (score(found, articles)[0], size / seconds)
    if peers:
        others |= pinned(peers, pages, articles, size)
    result = []
    extractors = {"fast": (Fast(), "resiliparse, main_content"), "careful": (Careful(), "trafilatura")}
    for kind, (extractor, nearest) in extractors.items():
        found, seconds = measured(
            lambda raw, extractor=extractor: page_text(raw, extractor), pages, 3 if kind == "fast" else 2
        )
        mine = (score(found, articles)[0], size / seconds)
        for peer, theirs in others.items():
            for what, unit, value, peer_value in zip(("F1", "speed"), ("", "MB/s per core"), mine, theirs):
                result.append(
                    {
                        "figure": f"HTML, {kind}: {what}",
                        "value": value,
                        "unit": unit,
                        "n": len(pages),
                        "peer": peer,
                        "peer_value": peer_value,
                        "ratio": value / peer_value,
                        "note": "the library it is built on" if peer == nearest else "",
                    }
                )
    return result


def pinned(
    peers: str, pages: dict[str, bytes], articles: dict[str, str], size: float
) -> dict[str, tuple[float, float]]:
    """{name: (F1, MB/s)} of the other interpreter's trafilatura; {} when it has none."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages.json"
        path.write_text(json.dumps({name: decode_page(raw) for name, raw in pages.items()}))
        done = subprocess.run([peers, "-c", _PEER, str(path)], capture_output=True, text=True)
    if done.returncode:
        return {}
    answer = json.loads(done.stdout)
    return {
        f"trafilatura {answer['version']} as FineWeb calls it": (
            score(answer["found"], articles)[0],
            size / answer["seconds"],
        )
    }
