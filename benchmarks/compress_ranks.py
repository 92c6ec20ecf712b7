"""Compression on 1, 2, 4 GPUs in one run: seconds a layer of GPTQ on random layers of a shape, and how many times faster.

python -m benchmarks.compress_ranks [--ranks 1,2,4] [--layers 4] [--num-sequences 512] [--seq-len 2048]
python -m benchmarks.compress_ranks --device cpu --shape tiny --ranks 1,2 --num-sequences 16 --seq-len 64 --no-ledger

Every number of ranks is a torchrun of its own, which compresses once with few sequences, so that kernels are compiled and
ranks connected, then `--repeats` times as asked; the least time counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import ledger
from benchmarks.compress import SHAPES, random_model
from hone.base.artifact import Artifact
from hone.base.run import Run
from hone.compress.stage import Compress
from hone.measure.machine import describe

FIGURES = ("time_s", "peak_memory_bytes", "relative_output_error")


def main() -> None:
    """Times every number of ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    arguments = _arguments()
    if arguments.model is not None:
        _work(arguments)
        return
    counts = [int(count) for count in arguments.ranks.split(",")]
    if arguments.device == "cuda":
        counts = [count for count in counts if count <= torch.cuda.device_count()]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
        shape = SHAPES[arguments.shape]
        random_model(shape, folder, arguments.layers, arguments.num_sequences, arguments.seq_len, dtype)
        found = {}
        for count in counts:
            found[count] = _timed(count, folder)
            print(json.dumps({count: found[count]}), flush=True)
    rows = _rows(found, arguments)
    print(ledger.table(rows))
    if not arguments.no_ledger:
        print(ledger.append("compress", rows, arguments.device))


def _timed(count: int, folder: Path) -> dict[str, float]:
    """The figures of `count` ranks, started with this command's own options."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += ["-m", "benchmarks.compress_ranks", *sys.argv[1:], f"--model={folder}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads((folder / f"figures-{count}.json").read_text())


def _work(arguments: argparse.Namespace) -> None:
    """One rank: compresses the model in `arguments.model` to warm up, then repeatedly; rank 0 writes the figures."""
    folder, run = arguments.model, Run(device=arguments.device, quiet=True)
    run.machine = run.mesh.from_leader(lambda: describe(arguments.device).model_dump(mode="json"))
    count = run.mesh.world_size
    parents = {"model": Artifact.read(folder / "model"), "data": Artifact.read(folder / "data")}
    best: dict[str, Any] = {}
    for number in range(arguments.repeats + 1):
        few = min(arguments.batch_size * count, arguments.num_sequences)
        spec = {
            "steps": [{"kind": "gptq", "bits": 4, "group_size": 128, "uneven": "nearest"}],
            "num_sequences": arguments.num_sequences if number else few,
            "seq_len": arguments.seq_len,
            "batch_size": arguments.batch_size,
            "check_sequences": 0,
        }
        made = Compress.read(spec).make(folder / f"compress-{count}-{number}", parents, run)
        figures: dict[str, Any] = {name: made.figures[name].value for name in FIGURES}
        estimate = made.figures["time_s"].estimate
        figures["time_s estimate"] = None if estimate is None else estimate.value
        if number and (not best or figures["time_s"] < best["time_s"]):
            best = figures
    if run.mesh.leads:
        (folder / f"figures-{count}.json").write_text(json.dumps(best))


def _rows(found: dict[int, dict[str, float]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ledger rows: each number of ranks beside the first."""
    first = min(found)
    label = f"{arguments.shape}, int4 g128, {arguments.num_sequences} x {arguments.seq_len} tokens"
    common = {"unit": "s", "n": arguments.repeats, "technique": "quantizer/gptq"}
    rows = []
    for count in found:
        value, peer = (found[one]["time_s"] / arguments.layers for one in (count, first))
        row = {"figure": f"seconds a layer on {count} {arguments.device} ({label})", "value": value, **common}
        if count != first:
            row |= {"peer": f"hone on {first}", "peer_value": peer, "ratio": value / peer}
            row["of_limit"] = peer * first / (value * count)
            print(
                f"{count} ranks: {peer / value:.2f} times as fast as {first}, predicted {_predicted(found, count, first)}"
            )
        rows.append(row)
        memory = {"figure": f"peak memory of one of {count} {arguments.device} ({label})", "unit": "B", "n": 1}
        rows.append({**common, **memory, "value": found[count]["peak_memory_bytes"]})
    return rows


def _predicted(found: dict[int, dict[str, float]], count: int, first: int) -> str:
    estimates = [found[one]["time_s estimate"] for one in (first, count)]
    return "none" if None in estimates else f"{estimates[0] / estimates[1]:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; those with too few GPUs are left out")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--num-sequences", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--scratch", type=Path, help="folder for temporary models; default: the system's")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
