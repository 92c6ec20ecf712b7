"""What the choice of a copy, earlier artifacts, clusters as columns and semantic deduplication cost.

    HONE_BEFORE=CHECKOUT python -m benchmarks.data keeping --data FOLDER

Speeds are megabytes of text per second of process CPU time of one thread, best of three, interleaved. With HONE_BEFORE, a folder with
the package hone of an earlier commit, the whole stage is run by both, in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.corpus import grown
from hone.base.run import Run
from hone.data import DEDUPS
from hone.data.annotate import annotate, read_items
from hone.data.corpus import Corpus
from hone.data.stage import Data
from hone.feed.files.listing import list_source
from hone.text.dedup.kmeans import assign, centroids_of, prune
from hone.text.langid.identify import Identifier

_ROUNDS = 3
_STAGE = """
import sys, time
from hone.base.run import Run
from hone.data.stage import Data
spec = Data.read({"source": sys.argv[1], "tokenizer": {"vocab_size": 1000}})
begun = time.process_time()
spec.make(sys.argv[2], run=Run(quiet=True))
print(time.process_time() - begun)
"""


def rows(data: Path, peers: str | None = None, megabytes: float = 20) -> list[dict[str, Any]]:
    """The rows of this benchmark; it has no peers."""
    texts = grown(data, megabytes).texts
    size = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        lines = (json.dumps({"text": text, "stars": place % 7}) + "\n" for place, text in enumerate(texts))
        (folder / "in" / "a.jsonl").write_text("".join(lines))
        made = _choices(folder, size, len(texts))
        before = os.environ.get("HONE_BEFORE")
        if before:
            made.append(_stage(folder, size, len(texts), before))
    return [*made, *_semantic()]


def _choices(folder: Path, size: float, count: int) -> list[dict[str, Any]]:
    """MinHash with each way to choose, and against an artifact of the same text."""
    shard = folder / "documents.parquet"
    options = Data.read({"metadata_fields": ["stars"]}).options
    annotate(read_items(list_source(str(folder / "in")).files, options), shard, identifier=Identifier())
    plain = {"source": str(folder / "in"), "tokenizer": {"vocab_size": 300}, "filters": ["length"], "dedups": []}
    earlier = Data.read(plain).make(folder / "earlier", run=Run(quiet=True)).folder
    ways: dict[str, dict[str, Any]] = {
        "keep lowest_id": {},
        "keep longest": {"keep": "longest"},
        "keep highest of a field": {"keep": "highest", "column": "stars"},
        "against an artifact of the same size": {"against": [str(earlier)]},
    }
    best = dict.fromkeys(ways, float("inf"))
    for number in range(_ROUNDS + 1):
        for place, (way, given) in enumerate(ways.items()):
            state = folder / f"state-{number}-{place}"
            state.mkdir()
            corpus = Corpus([shard])
            technique = DEDUPS.read({"kind": "minhash", **given})
            begun = time.process_time()
            technique.compare(corpus, np.ones(len(corpus), bool), state)  # type: ignore[attr-defined]
            if number:
                best[way] = min(best[way], time.process_time() - begun)
    return [
        {
            "figure": f"MinHash, {way}",
            "value": size / seconds,
            "unit": "MB/s per core",
            "n": count,
            "note": f"{size:.0f} MB",
        }
        for way, seconds in best.items()
    ]


def _stage(folder: Path, size: float, count: int, before: str) -> dict[str, Any]:
    """The whole stage now and before."""
    best = {"now": float("inf"), "before": float("inf")}
    paths = {"now": str(Path(__file__).parents[2]), "before": before}
    for number in range(_ROUNDS):
        for which, path in paths.items():
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", _STAGE, str(folder / "in"), str(folder / f"{which}-{number}")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
            best[which] = min(best[which], float(done.stdout.splitlines()[-1]))
    return {
        "figure": "hone data with its defaults, clusters as columns",
        "value": size / best["now"],
        "unit": "MB/s per core",
        "n": count,
        "peer": "hone before",
        "peer_value": size / best["before"],
        "ratio": best["before"] / best["now"],
        "note": f"{size:.0f} MB, serial, with the forecast and a tokenizer of 1000",
    }


def _semantic(count: int = 50_000, width: int = 384) -> list[dict[str, Any]]:
    """Clustering and pairs of random vectors with 10 % near copies, and how many copies are found."""
    draw = np.random.default_rng(0)
    base = draw.normal(size=(count * 9 // 10, width)).astype(np.float32)
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    copies = (
        base[draw.integers(0, len(base), count // 10)]
        + draw.normal(size=(count // 10, width)).astype(np.float32) * 0.006
    )
    vectors = np.concatenate([base, copies / np.linalg.norm(copies, axis=1, keepdims=True)])
    begun = time.process_time()
    nearest, similarity = assign(vectors, centroids_of(vectors, count // 1000, 20, 1))
    clustered = time.process_time()
    stands = prune(vectors, nearest, similarity, 0.95)
    ended = time.process_time()
    gone = float((stands != np.arange(count)).sum()) / (count // 10)
    note = f"{count} random vectors of {width}, 10 % near copies (cosine .99), {count // 1000} clusters: the worst case for k-means"
    return [
        {"figure": "semantic: k-means", "value": clustered - begun, "unit": "s", "n": 1, "note": note},
        {"figure": "semantic: pairs within clusters", "value": ended - clustered, "unit": "s", "n": 1, "note": note},
        {"figure": "semantic: copies found", "value": gone, "unit": "", "n": count // 10, "note": note},
    ]
