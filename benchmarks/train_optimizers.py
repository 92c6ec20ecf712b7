"""The optimizers at equal steps: the validation loss on real text, each with the best learning rate of a short grid.

    python -m benchmarks.train_optimizers BOOK.txt.gz ... [--steps 300] [--seeds 3]

Bytes of the text are the tokens; the last book is validation only. Every optimizer gets the same models, batches and schedule. Its peak learning rate
is doubled, or halved, as long as the loss of the first seed falls: the best one is better than twice and half of it, and is trained with the other seeds,
too. Runs that are done are kept in `--kept`, from which an interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.train_lossy import SEQ_LEN, SHAPE, VOCAB, bytes_of
from hone.base.errors import HoneError
from hone.model.context import Causal
from hone.model.decoder import build
from hone.ops import linear_cross_entropy
from hone.train import OPTIMIZERS
from hone.train.loop import Trainer
from hone.train.schedules.cosine import Cosine

RATES = {"adamw": 2e-3, "adamw_8bit": 2e-3, "muon": 8e-3, "lion": 4e-4, "adafactor": 2e-2, "soap": 4e-3}
"""The learning rate from which the search starts."""

SEQUENCES = 8


def main() -> None:
    """Trains with every optimizer, prints the table, adds it to the ledger."""
    arguments = _arguments()
    torch.set_num_threads(1)
    books = [np.frombuffer(gzip.open(path).read(), np.uint8) for path in arguments.text]
    train, val = np.concatenate(books[:-1]), books[-1]
    done: dict[str, list[float]] = json.loads(arguments.kept.read_text()) if arguments.kept.exists() else {}

    def run(name: str, lr: float, seed: int) -> list[float]:
        """(validation loss, seconds of a step, of its update)."""
        key = f"{name} {lr:g} {seed} {arguments.steps}"
        if key not in done:
            done[key] = _trained(name, lr, seed, arguments.steps, train, val)
            arguments.kept.write_text(json.dumps(done))
            print(key, *(f"{one:.4g}" for one in done[key]), flush=True)
        return done[key]

    rows = []
    for name, start in RATES.items():
        tried: dict[float, float] = {}
        best = _best(start, lambda lr: tried.setdefault(lr, run(name, lr, 0)[0]))  # noqa: B023
        found = [run(name, best, seed) for seed in range(arguments.seeds)]
        rows.append(_row(name, best, tried, found, len(train), arguments))
    for row in rows:
        row |= (
            {"peer": "adamw", "peer_value": rows[0]["value"], "ratio": row["value"] / rows[0]["value"]}
            if row is not rows[0]
            else {}
        )
    print(ledger.table(rows))
    if not arguments.no_ledger:
        print(ledger.append("train", rows, "cpu"))


def _best(start: float, loss: Callable[[float], float]) -> float:
    """The rate, `start` times a power of two, whose loss is below those of twice and half of it."""
    best = start
    for factor in (2.0, 0.5):
        while loss(best * factor) < loss(best):
            best *= factor
    return best


def _trained(name: str, lr: float, seed: int, steps: int, train: np.ndarray, val: np.ndarray) -> list[float]:
    """Validation loss (nats a byte; 99 where the training diverged), and the median seconds of a step and of its update."""
    model = build(SHAPE.config(VOCAB), seed=seed)
    optimizer = OPTIMIZERS.read({"kind": name, "lr": lr})
    trainer = Trainer(model, steps=steps, schedule=Cosine(warmup=20), optimizer=optimizer)
    apply, draw = trainer.update.apply, np.random.default_rng(seed)
    whole: list[float] = []
    updates: list[float] = []

    def timed(*numbers: float) -> None:
        begun = time.thread_time()
        apply(*numbers)
        updates.append(time.thread_time() - begun)

    trainer.update.apply = timed  # type: ignore[method-assign]
    try:
        for _ in range(steps):
            begun = time.thread_time()
            trainer.step(bytes_of(train, draw.integers(0, len(train) - SEQ_LEN - 1, SEQUENCES)))
            whole.append(time.thread_time() - begun)
    except HoneError as error:
        print(f"{name} {lr:g}: {error.what}", flush=True)
        return [99.0, 0.0, 0.0]
    starts, total = np.linspace(0, len(val) - SEQ_LEN - 1, 256).astype(np.int64), 0.0
    with torch.no_grad():
        for part in np.split(starts, 8):
            batch = bytes_of(val, part)
            tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
            x = model.head_input(model.hidden(tokens, Causal(tokens)))
            total += float(linear_cross_entropy(x, model.head_weight, targets)) / 8
    return [total, statistics.median(whole), statistics.median(updates)]


def _row(
    name: str,
    best: float,
    grid: dict[float, float],
    found: list[list[float]],
    train_bytes: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    losses, dims = [one[0] for one in found], SHAPE.config(VOCAB).dims()
    state = OPTIMIZERS.read(name).cost(dims, "float32", "cpu").state_bytes / dims.num_params
    tried = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in sorted(grid.items()))
    what = f"{dims.num_params:,} weights, {arguments.steps} steps of {SEQUENCES} x {SEQ_LEN} bytes of {len(arguments.text) - 1} books"
    return {
        "figure": f"{what}: {name}, validation loss at its best rate",
        "technique": f"optimizer/{name}",
        "value": statistics.mean(losses),
        "unit": "nats/byte",
        "n": len(losses),
        "range": max(losses) - min(losses),
        "lr": best,
        "update_s": statistics.median(one[2] for one in found),
        "step_s": statistics.median(one[1] for one in found),
        "note": f"lr {best:g} (seed 0: {tried}); {state:.2f} bytes of state a weight; validation: {Path(arguments.text[-1]).name}; "
        f"{train_bytes:,} bytes of text; times of one thread's CPU",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="books, gzip; the last is for validation")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--kept", type=Path, default=Path("train_optimizers.json"), help="file of the runs that are done"
    )
    parser.add_argument("--no-ledger", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
