"""Edits and decontamination: megabytes per second of one core, and the fraction of a suffix array's repeats that are found.

    python -m benchmarks.data edits --data FOLDER --peers INTERPRETER_WITH_pydivsufsort

Speeds are of text from Parquet to cuts (or to documents that are hit), in process CPU time of one thread, best of three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.corpus import grown
from benchmarks.data.dedup import write_shards
from benchmarks.data.peers_dedup import peak_kilobytes
from hone.data.contamination import ngrams
from hone.data.contamination.base import Found
from hone.data.contamination.ngrams import NGrams
from hone.data.corpus import Corpus
from hone.data.edits.cuts import Cuts, figures
from hone.data.edits.lines import Lines
from hone.data.edits.rows import ranks, spans_of
from hone.data.edits.substrings import Substrings

_SETS = ("arc_easy.jsonl", "gsm8k-test.jsonl", "hellaswag-2000.jsonl.gz", "lambada_openai.jsonl")


def opened(folder: Path) -> Corpus:
    """The shards in `folder` as a corpus of prose."""
    corpus = Corpus(sorted(folder.glob("[0-9].parquet")))
    corpus.columns.replace("kind", np.full(len(corpus), "prose"))
    corpus.columns.replace("source", np.full(len(corpus), "corpus", object))
    return corpus


def best_of(folder: Path, work: Callable[[Corpus, np.ndarray, Path], Any]) -> tuple[float, Any, Path]:
    """(best CPU seconds, result, state folder of it) of three runs from nothing, after one that compiles."""
    times = []
    for _ in range(4):
        state = Path(tempfile.mkdtemp(dir=folder))
        corpus = opened(folder)
        start = time.process_time()
        result = work(corpus, np.ones(len(corpus), bool), state)
        times.append(time.process_time() - start)
    return min(times[1:]), result, state


def texts_of(corpus: Corpus) -> Iterator[tuple[int, bytes]]:
    """(index, UTF-8) of every document."""
    everyone = np.ones(len(corpus), bool)
    for _, shard, first, _ in corpus.spans():
        for indices, texts in corpus.batches(shard, first, everyone):
            for index, start, end in zip(indices.tolist(), texts.offsets, texts.offsets[1:]):
                yield index, texts.data[start:end].tobytes()


def suffix_array(python: str | None, folder: Path, state: Path) -> dict[str, float]:
    """Time and memory of a suffix array of the same text, and the fraction of its repeats that the run in `state` found."""
    if python is None:
        return {}
    corpus = opened(folder)
    texts = dict(texts_of(corpus))
    order = np.argsort(ranks(corpus.columns["id"]), kind="stable").tolist()
    np.save(folder / "text.npy", np.frombuffer(b"".join(texts[index] + b"\0" for index in order), np.uint8))
    script = Path(__file__).with_name("peers_edits.py")
    done = subprocess.run([python, "-P", str(script), str(folder)], capture_output=True, text=True)
    if done.returncode:
        print(f"the suffix array did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    marked = np.load(folder / "marked.npy")
    begins, at = {}, 0
    for index in order:
        begins[index] = at
        at += len(texts[index]) + 1
    ours = np.zeros(len(marked), bool)
    for number, _, first, _ in corpus.spans():
        document, start, end = spans_of(sorted(state.glob("gone-*")), number)
        for index, low, high in zip((document + first).tolist(), start.tolist(), end.tolist()):
            ours[begins[index] + low : begins[index] + high] = True
    answer = json.loads(done.stdout)
    return {
        **answer,
        "bytes": int(marked.sum()),
        "found": int((ours & marked).sum()),
        "more": int((ours & ~marked).sum()),
    }


def extra_megabytes(folder: Path) -> float:
    """Peak megabytes of a fresh process above its libraries and compiled kernels, to cut substrings in `folder`."""
    command = [sys.executable, "-m", "benchmarks.data.edits", str(folder)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _memory_of(folder: Path) -> float:
    with tempfile.TemporaryDirectory() as name:
        write_shards([f"{'one two three four five six ' * 9} {number}" for number in range(16)], Path(name))
        small = opened(Path(name))
        Substrings().cuts(small, np.ones(len(small), bool), Path(name))
    before = peak_kilobytes()
    with tempfile.TemporaryDirectory() as name:
        corpus = opened(folder)
        Substrings().cuts(corpus, np.ones(len(corpus), bool), Path(name))
    return (peak_kilobytes() - before) / 1e3


def rows(data: Path, peers: str | None = None, megabytes: float = 30) -> list[dict[str, Any]]:
    """The rows of this benchmark; `peers` is an interpreter that has pydivsufsort."""
    made = grown(data, megabytes)
    size = sum(len(text.encode()) for text in made.texts) / 1e6
    result: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(made.texts, folder)

        def add(figure: str, value: float, unit: str, peer: tuple[str, float] | None = None, note: str = "") -> None:
            row: dict[str, Any] = {"figure": figure, "value": value, "unit": unit, "n": len(made.texts), "note": note}
            if peer is not None:
                row |= {"peer": peer[0], "peer_value": peer[1], "ratio": value / peer[1]}
            result.append(row)

        seconds, cuts, state = best_of(folder, Substrings().cuts)
        other = suffix_array(peers, folder, state)
        peer = ("pydivsufsort + Kasai", size / other["seconds"]) if other else None
        note = "the peer has its text in memory; this reads and writes Parquet and state files"
        add("substrings: speed", size / seconds, "MB/s per core", peer, note)
        memory = extra_megabytes(folder)
        peer = ("pydivsufsort + Kasai", other["extra_megabytes"] / size * 100) if other else None
        add("substrings: extra memory per 100 MB", memory / size * 100, "MB", peer)
        if other:
            share = other["found"] / max(other["bytes"], 1)
            note = f"of {other['bytes']} bytes; {other['more']} found besides"
            add("substrings: share of the suffix array's bytes", share, "", None, note)
        found = _found(folder, state)
        cut = figures(cuts)["cut_bytes"]
        add(
            "substrings: bytes cut of bytes found",
            cut / max(found, 1),
            "",
            None,
            "cuts end between words; short rests go",
        )
        state_bytes = sum(path.stat().st_size for path in state.iterdir())
        add("substrings: state on disk per byte of text", state_bytes / size / 1e6, "B/B")
        for spec in (Lines(), Lines(unit="paragraph"), Lines(unit="sentence", window=3, min_documents=1)):
            seconds, cuts, _ = best_of(folder, spec.cuts)
            note = f"window {spec.window}; {figures(cuts)['cut_bytes']} bytes cut"
            add(f"{spec.unit}s: speed", size / seconds, "MB/s per core", None, note)
        sets = tuple(str(data / "benchmarks" / part) for part in _SETS)
        spec = NGrams(evaluations=sets, num_samples=0)

        def search(corpus: Corpus, alive: np.ndarray, state: Path) -> Found:
            ngrams._read_and_index.cache_clear()
            return spec.contaminated(corpus, alive, state)

        seconds, held, _ = best_of(folder, search)
        hit = {name: row["hit"] for name, row in held.figures["evaluations"].items()}
        note = (
            f"{held.figures['ngrams']} n-grams of {len(sets)} sets, read and hashed in that time; examples hit: {hit}"
        )
        add("decontamination: speed", size / seconds, "MB/s per core", None, note)
    return result


def _found(folder: Path, state: Path) -> int:
    """Repeated bytes found by a run of substrings, before cuts are moved to word boundaries."""
    paths = sorted(state.glob("gone-*"))
    return sum(Cuts.of(*spans_of(paths, number)).num_bytes for number, *_ in opened(folder).spans())


if __name__ == "__main__":  # alone in its process
    print(_memory_of(Path(sys.argv[1])))
