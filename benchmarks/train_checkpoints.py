"""What a training step waits for a checkpoint: written inside the step, and by a thread (`checkpoint.async_mode: async`).

    python -m benchmarks.train_checkpoints                           # a CPU, the tiny shape
    python -m benchmarks.train_checkpoints --device cuda             # llama3-1b

Both save the same trainer's state, in turns, and train `--between` steps after each; the first round is not counted. `stall` is
the time until `Trainer.save` returns, `step` that of the training steps after it, beside which the thread writes. `written`
is from the save's begin to the end of the first step after which the checkpoint counts. Medians of `--rounds`. Weights and tokens are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.train import SHAPES, random_batch, random_decoder
from hone.train.checkpoint import Checkpoints
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine


def main() -> None:
    """Times both in turns, prints a table and a JSON line per row, adds the rows to the ledger unless told not to."""
    arguments = _arguments()
    sizes, vocab = SHAPES[arguments.shape]
    steps = 3 + 2 * (arguments.rounds + 1) * arguments.between
    trainer = Trainer(random_decoder(sizes.config(vocab), arguments.device), steps=steps, schedule=Cosine())
    batch = random_batch(np.random.default_rng(0), vocab, arguments.rows, arguments.seq_len)
    plain = [_step_s(trainer, batch) for _ in range(3)][1:]
    found: dict[str, list[tuple[float, float, float]]] = {"disabled": [], "async": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        made = {mode: Checkpoints(Path(folder) / mode, 1, background=mode == "async") for mode in found}
        for _ in range(arguments.rounds + 1):
            for mode, checkpoints in made.items():
                found[mode].append(_round(trainer, batch, checkpoints, arguments.between))
        size = made["disabled"].largest_bytes
    rows: list[dict[str, Any]] = []
    for mode, rounds in found.items():
        stall, step, written = (statistics.median(one) for one in zip(*rounds[1:], strict=True))
        said = f"{size:,} B; {arguments.between} steps of {step * 1e3:.0f} ms after it, {min(plain) * 1e3:.0f} ms without one; "
        rows.append(
            {
                "figure": f"{arguments.shape}: a step waits for a checkpoint, {mode}",
                "value": round(stall, 4),
                "unit": "s",
                "n": arguments.rounds,
                "note": f"{said}durable within {written:.2f} s",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    print(ledger.table(rows))
    if not arguments.no_ledger:
        ledger.append("train", rows, device=arguments.device)


def _round(trainer: Trainer, batch: Any, checkpoints: Checkpoints, between: int) -> tuple[float, float, float]:
    """Seconds of (stall, a step after it, until the checkpoint counts)."""
    _wait(trainer)
    target = checkpoints.folder / f"step-{trainer.done:08d}"
    begun = time.perf_counter()
    trainer.save(checkpoints)
    stall = time.perf_counter() - begun
    steps: list[float] = []
    written = stall if target.exists() else 0.0
    for _ in range(between):
        steps.append(_step_s(trainer, batch))
        if not written and target.exists():
            written = time.perf_counter() - begun
    if not written:
        checkpoints.finish()
        written = time.perf_counter() - begun
    return stall, statistics.median(steps), written


def _step_s(trainer: Trainer, batch: Any) -> float:
    begun = time.perf_counter()
    trainer.step(batch)
    _wait(trainer)
    return time.perf_counter() - begun


def _wait(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--between", type=int, default=4, help="training steps after each checkpoint")
    parser.add_argument("--folder", help="where to write; empty: the temporary folder")
    parser.add_argument("--no-ledger", action="store_true")
    arguments = parser.parse_args()
    arguments.shape = arguments.shape or ("llama3-1b" if arguments.device.startswith("cuda") else "tiny")
    return arguments


if __name__ == "__main__":
    main()
