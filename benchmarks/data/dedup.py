"""Deduplication of whole documents: speed from Parquet to clusters, recall and precision against exact Jaccard, and the peers.

    python -m benchmarks.data dedup --data FOLDER --peers INTERPRETER_WITH_datasketch,datatrove,rensa

Speeds are megabytes of text per second of process CPU time of one thread, best of three. A pair is found when both
documents are in one cluster; a removed document's best Jaccard is that with the nearest other document of its cluster.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from benchmarks.data.corpus import Grown, grown, jaccard, shingles
from benchmarks.data.peers_dedup import peak_kilobytes
from hone.data.corpus import Corpus
from hone.data.dedup.exact import Exact
from hone.data.dedup.minhash import MinHash
from hone.data.dedup.simhash import SimHash
from hone.text.dedup import union_find

_SHARDS = 8
_KINDS = {"MinHash": MinHash, "SimHash": SimHash, "Exact": Exact}
_BUCKETS = ((0.95, 1.0), (0.8, 0.95), (0.7, 0.8), (0.5, 0.7))


def write_shards(texts: list[str], folder: Path) -> Corpus:
    """The corpus as Parquet shards (zstd) with the columns that deduplication needs."""
    shards = []
    for number in range(_SHARDS):
        chosen = texts[number * len(texts) // _SHARDS : (number + 1) * len(texts) // _SHARDS]
        hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in chosen]
        # A unique id that is independent of the order of reading.
        ids = [hashlib.blake2b(f"{number}:{place}".encode(), digest_size=8).hexdigest() for place in range(len(chosen))]
        columns = {
            "id": pa.array(ids, pa.string()),
            "text": pa.array(chosen, pa.large_string()),
            "text_hash": pa.array([int.from_bytes(digest, "little") for digest in hashes], pa.uint64()),
        }
        shards.append(folder / f"{number}.parquet")
        parquet.write_table(pa.table(columns), shards[-1], compression="zstd", row_group_size=4000)
    return Corpus(shards)


def quality(made: Grown, stands: np.ndarray) -> dict[str, float]:
    """Recall of the injected pairs per bucket of Jaccard similarity, documents removed, and how many of them have a near one."""
    found: dict[str, float] = {}
    pairs = [(jaccard_, stands[one] == stands[other]) for one, other, jaccard_ in made.pairs]
    for low, high in _BUCKETS:
        here = [hit for value, hit in pairs if low <= value < high or value == high == 1.0]
        found[f"recall J {low:g}-{high:g}"] = sum(here) / max(len(here), 1)
    members = defaultdict(list)
    for index in np.flatnonzero(np.bincount(stands, minlength=len(stands))[stands] > 1):
        members[stands[index]].append(int(index))
    near = removed = 0
    for representative, group in members.items():
        sets = {index: shingles(made.texts[index]) for index in group}
        for index in group:
            if index != representative:
                removed += 1
                near += any(jaccard(sets[index], sets[other]) >= 0.7 for other in group if other != index)
    return {**found, "removed": removed, "removed with J >= 0.7": near / max(removed, 1)}


def expected(made: Grown, low: float, high: float) -> dict[str, Any]:
    """Number of injected pairs in a bucket, and the expected recall of 14 bands of 8 hashes on them."""
    values = np.array([value for _, _, value in made.pairs if low <= value < high or value == high == 1.0])
    if not len(values):
        return {"n": 0}
    chances = 1 - (1 - values**8) ** 14
    deviation = np.sqrt((chances * (1 - chances)).sum()) / len(values)
    return {"n": len(values), "note": f"by 1 - (1 - J^8)^14 of these pairs: {chances.mean():.4f} +- {deviation:.4f}"}


def extra_megabytes(kind: str, folder: Path) -> float:
    """Peak megabytes of a fresh process above its libraries and compiled kernels, to deduplicate the shards in `folder`."""
    command = [sys.executable, "-m", "benchmarks.data.dedup", kind, str(folder)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _memory_of(kind: str, folder: Path) -> float:
    with tempfile.TemporaryDirectory() as name:
        small = write_shards(["one two three four five six", "seven"] * _SHARDS, Path(name))
        _KINDS[kind]().compare(small, np.ones(len(small), bool), Path(name))
    before = peak_kilobytes()
    corpus = Corpus(sorted(folder.glob("[0-9].parquet")))
    with tempfile.TemporaryDirectory() as name:
        _KINDS[kind]().compare(corpus, np.ones(len(corpus), bool), Path(name))
    return (peak_kilobytes() - before) / 1e3


def rows(data: Path, peers: str | None = None, megabytes: float = 60) -> list[dict[str, Any]]:
    """The rows of this benchmark; `peers` is an interpreter that has the peers."""
    made = grown(data, megabytes)
    size = sum(len(text.encode()) for text in made.texts) / 1e6
    result = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_shards(made.texts, folder)
        others = run_peers(peers, corpus, folder, made)
        for kind in _KINDS:
            seconds, stands = _measure(_KINDS[kind](), corpus, folder)
            memory = extra_megabytes(kind, folder)
            against = list(others) if kind == "MinHash" else []
            figures = {"speed": size / seconds, "extra memory per 100 MB": memory / size * 100, **quality(made, stands)}
            units = {"speed": "MB/s per core", "extra memory per 100 MB": "MB", "removed": "documents"}
            what = f"{kind}, Parquet to clusters"
            for figure, value in figures.items():
                row = {
                    "figure": f"{what}: {figure}",
                    "value": value,
                    "unit": units.get(figure, ""),
                    "n": len(made.texts),
                }
                if kind == "MinHash" and figure.startswith("recall"):
                    row |= expected(made, *map(float, figure.split()[-1].split("-")))
                seen = [(peer, others[peer][figure]) for peer in against if figure in others.get(peer, {})]
                result += [
                    {**row, "peer": peer, "peer_value": other, "ratio": value / other if other else None}
                    for peer, other in seen
                ] or [row]
    return [*result, clustering()]


def _measure(technique: Any, corpus: Corpus, folder: Path) -> tuple[float, np.ndarray]:
    """(best CPU seconds, representatives) of three runs from nothing, after one that compiles."""
    times, stands = [], np.empty(0, np.int64)
    for number in range(4):
        state = folder / f"state-{type(technique).__name__}-{number}"
        state.mkdir()
        fresh = Corpus(corpus.shards)
        start = time.process_time()
        stands = technique.compare(fresh, np.ones(len(fresh), bool), state).stands
        times.append(time.process_time() - start)
    return min(times[1:]), stands


def clustering(num_documents: int = 100_000_000, num_edges: int = 60_000_000) -> dict[str, Any]:
    """Union-find of random edges."""
    draw = np.random.default_rng(0)
    ones, others = (draw.integers(0, num_documents, num_edges, dtype=np.int32) for _ in range(2))
    small = union_find.singles(2)
    union_find.join(small, ones[:0], others[:0])
    union_find.flatten(small)
    start = time.process_time()
    parents = union_find.singles(num_documents)
    union_find.join(parents, ones, others)
    union_find.flatten(parents)
    seconds = time.process_time() - start
    note = f"{(parents.nbytes + ones.nbytes + others.nbytes) / 1e9:.1f} GB; random edges, the worst case"
    return {"figure": "clustering, 100 M documents, 60 M edges", "value": seconds, "unit": "s", "n": 1, "note": note}


def run_peers(python: str | None, corpus: Corpus, folder: Path, made: Grown) -> dict[str, dict[str, float]]:
    """{peer: its figures} by the same measures, each peer in a process of its own."""
    result: dict[str, dict[str, float]] = {}
    if python is None:
        return result
    script = Path(__file__).with_name("peers_dedup.py")
    size = sum(len(text.encode()) for text in made.texts) / 1e6
    for peer in ("rensa", "datasketch", "datatrove"):
        out = folder / f"{peer}.json"
        done = subprocess.run([python, str(script), peer, str(folder), str(out)], capture_output=True, text=True)
        if done.returncode:
            print(f"{peer} did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        answer = json.loads(out.read_text())
        stands = np.array(answer["stands"])
        memory = answer["extra_megabytes"] / size * 100
        result[peer] = {
            "speed": size / answer["seconds"],
            "extra memory per 100 MB": memory,
            **quality(made, stands),
        }
    return result


if __name__ == "__main__":  # alone in its process
    print(_memory_of(sys.argv[1], Path(sys.argv[2])))
