"""Tensor-parallel training: a step with its transfers before and after products, beside them, and compiled, in one run.

    python -m benchmarks.train_tensor [--ranks 2] [--rounds 3] [--no-ledger]                          # gloo, the small shape, float32
    python -m benchmarks.train_tensor --device cuda --ranks 8 --shape llama3-8b --batch 1 --seq-len 8192 --precision bf16

One torchrun; the forms take turns, `--steps` steps each a round, and the round with the least seconds counts. All begin with the same weights and
read the same sequences, and the run ends with an error where their first losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.train import SHAPES, random_batch, random_decoder
from hone.base.mesh import Mesh
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.train.activation_checkpointing import KeepAll
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.precision import TORCH_NAMES
from hone.train.schedules.cosine import Cosine
from hone.train.work import Work, hidden_s, inside_s, step_seconds

FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "all tokens on each rank": ({"enable_sequence_parallel": False}, False),
    "sequence parallel": ({}, False),
    "sequence parallel, transfers beside products": ({"enable_async_tensor_parallel": True}, False),
    "sequence parallel, compiled": ({}, True),
    "sequence parallel, transfers beside products, compiled": ({"enable_async_tensor_parallel": True}, True),
}


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    arguments = _arguments()
    if arguments.out is not None:
        _work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        command += ["-m", "benchmarks.train_tensor", *sys.argv[1:], f"--out={out}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        rows = json.loads(out.read_text())
    print(ledger.table(rows))
    if not arguments.no_ledger:
        print(ledger.append("train", rows, arguments.device))


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every form in turn; rank 0 writes the rows."""
    mesh = Mesh.from_environment()
    device, (shape, vocab) = mesh.place(arguments.device), SHAPES[arguments.shape]
    batch = random_batch(np.random.default_rng(0), vocab, arguments.batch, arguments.seq_len)
    forms = {name: form for name, form in FORMS.items() if arguments.compiled or not form[1]}
    best: dict[str, float] = {}
    losses: dict[str, float] = {}
    with mesh.together():
        for number in range(arguments.rounds):
            for name, (options, compiled) in forms.items():
                trainer = _trainer(mesh, device, options, compiled, arguments)
                losses[name] = trainer.step(
                    batch
                ).loss  # with the compilation, the optimizer's state and the first transfers
                trainer.step(batch)
                _wait(device)
                mesh.gather(None)
                started = time.perf_counter()
                for _ in range(arguments.steps):
                    trainer.step(batch)
                _wait(device)
                seconds = max(mesh.gather(time.perf_counter() - started)) / arguments.steps
                best[name] = min(best.get(name, seconds), seconds)
                del trainer
                if device.startswith("cuda"):
                    torch.cuda.empty_cache()
            if mesh.leads:
                print(f"round {number + 1}: {best}; losses {losses}", flush=True)
        apart = max(losses.values()) - min(losses.values())
        assert apart < (1e-5 if arguments.precision == "fp32" else 2e-2), (
            f"the forms do not train the same model: {losses}"
        )
        if mesh.leads:
            rows = [_row(name, best, shape.config(vocab), arguments) for name in best]
            arguments.out.write_text(json.dumps(rows))


def _trainer(
    mesh: Mesh, device: str, options: dict[str, Any], compiled: bool, arguments: argparse.Namespace
) -> Trainer:
    shape, vocab = SHAPES[arguments.shape]
    shared = Parallelism.read({"tensor_parallel_degree": arguments.ranks, **options})
    ranks = shared.ranks(mesh, device)
    torch.manual_seed(0)  # a GPU's weights are drawn there, equal on all ranks
    whole = random_decoder(shape.config(vocab), device) if device.startswith("cuda") else build(shape.config(vocab))
    model = shared.decoder(whole, ranks, arguments.seq_len)
    del whole
    kept: dict[str, Any] = {"precision": arguments.precision, "compile": compiled, "ranks": ranks}
    return Trainer(model, steps=10**6, schedule=Cosine(warmup=2), optimizer=AdamW(), **kept)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _row(name: str, best: dict[str, float], config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    facts, tokens = config.facts(), arguments.batch * arguments.seq_len
    shared = Parallelism.read({"tensor_parallel_degree": arguments.ranks, **FORMS[name][0]})
    parts = shared.shared(config, lambda part: AdamW().cost(part, "float32", arguments.device), 1, arguments.seq_len)
    work = Work(
        facts, 1, arguments.batch, arguments.seq_len, TORCH_NAMES[arguments.precision],
        KeepAll().segments(facts.num_layers), parts.update, packed=False, tensor=parts.tensor,
    )  # fmt: skip
    machine = describe(arguments.device).model_copy(update={"num_ranks": arguments.ranks})
    predicted = step_seconds(work, machine).value
    plain = best["sequence parallel"]
    what = f"{arguments.shape} on {arguments.ranks} tensor-parallel ranks, {arguments.precision}, {arguments.batch} x {arguments.seq_len}"
    return {
        "figure": f"{what}: {name}",
        "value": tokens / best[name],
        "unit": "tokens/s",
        "n": arguments.rounds,
        "predicted": tokens / predicted,
        "peer": "sequence parallel",
        "peer_value": tokens / plain,
        "ratio": plain / best[name],
        "note": f"{best[name]:.4g} s a step, predicted {predicted:.4g} s, of which transfers {inside_s(work, machine):.3g} s, and "
        f"{hidden_s(work, machine):.3g} s of them beside products; load {os.getloadavg()[0]:.1f}",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=4, help="sequences, which all ranks share")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="also the compiled forms, which take minutes on a CPU")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
