"""Scale: the same `hone data` run at several sizes, its growth with the corpus, and the cost of a terabyte and a trillion tokens.

    python -m benchmarks.data.scale --data FOLDER --work FOLDER --gigabytes 0.1 1 10 [--workers 2] [--ledger]

The corpus is made by benchmarks/data/growth.py; a smaller one is the beginning of a larger. Each size runs in a process
of its own with the default filters and deduplications, GPT-2's tokenizer and `--workers` worker processes. All figures of
the table are measured; what is extrapolated says so. The results of sizes that ran before with the same code are taken
from `--work` (`--again` runs them again), so that the table can be put together from several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import tokenizers

from benchmarks.data.growth import FILE_BYTES, grow
from benchmarks.ledger import append
from hone.data.executors.task import code_version

PRICE = 0.05
"""Dollars per hour of one core: about the on-demand list price of a physical core of a compute machine (2024 to 2026)."""
_RUN = """
import json, sys
from hone.base.run import Run
from hone.data.stage import Data

spec, out, executor = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
Data.read(spec).make(out, run=Run(quiet=True, executor=executor))
"""
_STEPS = {
    "read": ("read",),
    "filter": ("filter",),
    "dedup": ("deduplicate", "edit", "decontaminate"),
    "tokenize": ("tokenizer", "tokenize"),
    "write": ("write",),
}


def rows(data: Path, peers: str | None = None, megabytes: float = 100) -> list[dict[str, Any]]:
    """The rows of one size, in a folder that is removed again."""
    with tempfile.TemporaryDirectory() as work:
        return ledger_rows([measured(data, Path(work), megabytes / 1000, 2, again=True)], PRICE)


def measured(data: Path, work: Path, gigabytes: float, workers: int, *, again: bool = False) -> dict[str, Any]:
    """One size's run: bytes, documents, tokens, seconds, CPU seconds, memory, disk; kept in `work` for the next call."""
    work.mkdir(parents=True, exist_ok=True)
    note = work / f"run-{gigabytes:g}-{workers}-{code_version()}.json"
    if note.exists() and not again:
        return json.loads(note.read_text())
    source = grow(data, work, max(round(gigabytes * 1e9 / FILE_BYTES), 1))
    spec = {"source": str(source), "tokenizer": {"path": str(tokenizer(data, work))}}
    out = work / f"data-{gigabytes:g}"
    first = work / "first.parquet"
    with parquet.ParquetFile(next(iter(sorted(source.iterdir())))) as table:
        parquet.write_table(pa.Table.from_batches([next(table.iter_batches(500))]), first)
    for name in (first, source):  # the first run compiles the kernels that no one has run here yet
        _remove(out)
        command = [sys.executable, "-c", _RUN, json.dumps({**spec, "source": str(name)}), str(out)]
        command.append(json.dumps({"kind": "processes", "workers": workers}))
        if name == first:
            subprocess.run(command, check=True)
    begun = time.perf_counter()
    process = subprocess.Popen(command)
    watch = _Disk(out)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    disk = watch.stop()
    if status:
        raise RuntimeError(f"the run of {gigabytes:g} GB ended with status {status}")
    made = json.loads((out / "hone.json").read_text(encoding="utf8"))
    figures = {figure["name"]: figure["value"] for figure in made["figures"]}
    found = {
        "gigabytes": figures["input_bytes"] / 1e9,
        "input_documents": figures["input_documents"],
        "kept_bytes": figures["kept_bytes"],
        "kept_documents": figures["kept_documents"],
        "tokens": figures["train_tokens"] + figures["val_tokens"],
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "steps": json.loads((out / "log" / "seconds.json").read_text(encoding="utf8")),
        "parent_bytes": figures["peak_memory_bytes"],
        "worker_bytes": figures["worker_memory_bytes"],
        "disk_bytes": disk,
        "workers": workers,
    }
    note.write_text(json.dumps(found, indent=1))
    _remove(out)
    return found


def tokenizer(data: Path, work: Path) -> Path:
    """A folder with GPT-2's tokenizer."""
    folder = work / "gpt2"
    folder.mkdir(exist_ok=True)
    raw = data / "tokenizers" / "gpt2"
    merges = [tuple(line.split(" ")) for line in (raw / "vocab.bpe").read_text(encoding="utf8").splitlines()[1:]]
    vocab = json.loads((raw / "encoder.json").read_text(encoding="utf8"))
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<|endoftext|>"])
    (folder / "tokenizer.json").write_text(core.to_str(), encoding="utf8")
    return folder


class _Disk:
    """Peak bytes in the folder of a run, sampled every second."""

    def __init__(self, out: Path) -> None:
        self._folders = (out, out.with_name(out.name + ".partial"))
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while not self._over.wait(1):
            self._most = max(self._most, sum(_size(folder) for folder in self._folders))


def _size(folder: Path) -> int:
    """Bytes below `folder`; files removed meanwhile are skipped."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _remove(out: Path) -> None:
    for folder in (out, out.with_name(out.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)


def fit(found: list[dict[str, Any]], name: str, by: str) -> tuple[float, float, float]:
    """(a, b, largest relative error) of `name` = a + b x `by`: least squares of relative errors, a >= 0; of one size a is 0."""
    x, y = (np.array([row[key] for row in found], float) for key in (by, name))
    slope, start = float((x / y).sum() / ((x / y) ** 2).sum()), 0.0
    if len(found) > 1:
        columns = np.stack([1 / y, x / y], 1)
        solved = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
        if solved[0] > 0:
            start, slope = float(solved[0]), float(solved[1])
    return start, slope, float(np.abs((start + slope * x) / y - 1).max())


def costs(found: list[dict[str, Any]], price: float) -> dict[str, float]:
    """Extrapolated core-hours and dollars for a terabyte of raw text and for a trillion kept tokens."""
    _, per_gigabyte, error = fit(found, "cpu_seconds", "gigabytes")
    largest = max(found, key=lambda row: row["gigabytes"])
    tokens_a_terabyte = largest["tokens"] / largest["gigabytes"] * 1000
    hours = per_gigabyte * 1000 / 3600
    return {
        "core_seconds_a_gigabyte": per_gigabyte,
        "fit_error": error,
        "tokens_a_terabyte": tokens_a_terabyte,
        "core_hours_a_terabyte": hours,
        "dollars_a_terabyte": hours * price,
        "core_hours_a_trillion_tokens": hours * 1e12 / tokens_a_terabyte,
        "dollars_a_trillion_tokens": hours * 1e12 / tokens_a_terabyte * price,
        "terabytes_a_trillion_tokens": 1e12 / tokens_a_terabyte,
    }


def markdown(found: list[dict[str, Any]], price: float) -> str:
    """The tables of docs/scale.md."""
    head = ["raw text, GB", "documents", "wall s", *(f"{name} s" for name in _STEPS), "start, end s", "core-s"]
    head.append("MB/s per core")
    head += ["parent, MB", "largest worker, MB", "disk, GB", "documents kept", "tokens kept"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in found:
        steps = [f"{sum(row['steps'].get(name, 0) for name in names):.1f}" for names in _STEPS.values()]
        rest = row["seconds"] - sum(row["steps"].get(name, 0) for names in _STEPS.values() for name in names)
        cells = [f"{row['gigabytes']:.2f}", f"{row['input_documents']:,.0f}", f"{row['seconds']:.0f}", *steps]
        cells += [f"{rest:.1f}", f"{row['cpu_seconds']:.0f}", f"{1000 * row['gigabytes'] / row['cpu_seconds']:.1f}"]
        cells += [f"{row['parent_bytes'] / 1e6:.0f}", f"{row['worker_bytes'] / 1e6:.0f}"]
        cells += [f"{row['disk_bytes'] / 1e9:.2f}", f"{row['kept_documents']:,.0f}", f"{row['tokens'] / 1e6:,.1f} M"]
        lines.append("| " + " | ".join(cells) + " |")
    start, slope, error = fit(found, "cpu_seconds", "gigabytes")
    memory = fit(found, "parent_bytes", "input_documents")
    cost = costs(found, price)
    lines += [
        "",
        f"- core-seconds = {start:.1f} + {slope:.1f} x GB of raw text (largest error {100 * error:.0f} %)",
        f"- memory of the parent = {memory[0] / 1e6:.0f} MB + {memory[1]:.0f} B x documents (largest error {100 * memory[2]:.0f} %)",
        "",
        f"| extrapolated, {price:g} $ a core-hour | a TB of raw text | a trillion tokens kept |",
        "|---|---|---|",
        f"| raw text, TB | 1 | {cost['terabytes_a_trillion_tokens']:.1f} |",
        f"| tokens kept, billion | {cost['tokens_a_terabyte'] / 1e9:.0f} | 1000 |",
        f"| core-hours | {cost['core_hours_a_terabyte']:.1f} | {cost['core_hours_a_trillion_tokens']:.0f} |",
        f"| dollars | {cost['dollars_a_terabyte']:.2f} | {cost['dollars_a_trillion_tokens']:.2f} |",
    ]
    return "\n".join(lines)


def ledger_rows(found: list[dict[str, Any]], price: float) -> list[dict[str, Any]]:
    """The same as rows of the ledger."""
    made: list[dict[str, Any]] = []
    for row in found:
        size = f"hone data, {row['gigabytes']:.1f} GB, {row['workers']} workers"
        speed = 1000 * row["gigabytes"] / row["cpu_seconds"]
        made += [
            {"figure": f"{size}: speed", "unit": "MB/s per core", "n": 1, "value": speed},
            {"figure": f"{size}: time", "unit": "s", "n": 1, "value": row["seconds"], "steps": row["steps"]},
            {"figure": f"{size}: parent's memory", "unit": "B", "n": 1, "value": row["parent_bytes"]},
            {"figure": f"{size}: largest worker's memory", "unit": "B", "n": 1, "value": row["worker_bytes"]},
            {"figure": f"{size}: disk", "unit": "B", "n": 1, "value": row["disk_bytes"]},
            {"figure": f"{size}: tokens kept", "unit": "tokens", "n": 1, "value": row["tokens"]},
        ]
    cost = costs(found, price)
    sizes = ", ".join(f"{row['gigabytes']:.1f}" for row in found)
    about = {"n": len(found), "how": "modelled", "from": f"runs of {sizes} GB", "price": price}
    for name, unit in (("core_hours", "core-hours"), ("dollars", "$")):
        for goal in ("terabyte", "trillion_tokens"):
            said = f"a {goal.replace('_', ' ')}, extrapolated"
            made.append({"figure": said, "unit": unit, "value": cost[f"{name}_a_{goal}"], **about})
    return [{"area": "scale", **row} for row in made]


def main() -> None:
    """Runs the given sizes and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of real data")
    parser.add_argument("--work", type=Path, required=True, help="folder for the corpus and the runs")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.1, 1], help="sizes of raw text")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--price", type=float, default=PRICE, help=f"dollars a core-hour [{PRICE}]")
    parser.add_argument("--again", action="store_true", help="run again what ran before")
    parser.add_argument("--ledger", action="store_true", help="add the rows to the ledger")
    given = parser.parse_args()
    found = []
    for gigabytes in sorted(given.gigabytes):
        found.append(measured(given.data, given.work, gigabytes, given.workers, again=given.again))
        print(json.dumps(found[-1]), flush=True)
    print("\n" + markdown(found, given.price))
    if given.ledger:
        append("data", ledger_rows(found, given.price))


if __name__ == "__main__":
    main()
