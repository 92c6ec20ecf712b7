"""Filtering from the stored columns of an artifact with other filters, against reading and measuring the texts again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data.clock import best_of
from benchmarks.data.corpus import corpus
from hone.base.run import Run
from hone.data.filters.decide import redecide
from hone.data.stage import Data

_FILTERS = ["length", {"kind": "gopher_quality", "min_words": 20}, "gopher_repetition", "c4"]


def rows(data: Path, peers: str | None, megabytes: float = 60) -> list[dict[str, Any]]:
    """The rows of this benchmark, on English, code and other languages, and on stories alone, which are short."""
    found = []
    for name, texts in (("mixed text", corpus(data, megabytes)), ("parts of 700 bytes", _short(data, megabytes))):
        found += _measured(name, texts)
    return found


def _short(data: Path, megabytes: float) -> list[str]:
    return [text[start : start + 700] for text in corpus(data, megabytes / 4) for start in range(0, len(text), 700)]


def _measured(name: str, texts: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "rows.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf8")
        spec = Data.read({"source": str(source), "dedups": [], "tokenizer": {"vocab_size": 512}})
        made = spec.make(Path(work) / "data-made", run=Run(quiet=True))
        columns = sum(path.stat().st_size for path in (made.folder / "signals").glob("*.parquet"))
        seconds, _ = best_of(3, lambda: redecide(made.folder, _FILTERS))
        clock = json.loads((made.folder / "log" / "seconds.json").read_text())
        read = clock["read"] + clock["filter"]
    what, count = f"deciding again, {name}", len(texts)
    return [
        {
            "figure": f"{what}: a million documents", "value": seconds / count * 1e6, "unit": "s", "n": 3,
            "peer": "the stage's reading and filtering", "peer_value": read / count * 1e6, "ratio": read / seconds,
            "note": f"{count} documents",
        },
        {"figure": f"{what}: columns kept", "value": columns / count, "unit": "B a document", "n": 1},
        {"figure": f"{what}: columns kept", "value": columns / sum(len(text.encode()) for text in texts), "unit": "of the text", "n": 1},
    ]  # fmt: skip
