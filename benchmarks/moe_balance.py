"""What each balance does to the load of experts and to the loss, on a task of skewed topics: prints the table of docs/moe.md, adds its rows to the ledger.

`python -m benchmarks.moe_balance [--steps=N] [--seeds=N]`, a few minutes on two CPU cores. Each sequence follows the bigrams of one of
eight topics, the first of which half of the sequences have, the second a quarter, and so on.
"""

from __future__ import annotations

import argparse
import sys
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import ledger
from hone.feed.load import Batch
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine

VOCAB, TOPICS, EXPERTS, TOP_K, SEQ, BATCH, LAST = 64, 8, 8, 2, 48, 16, 20
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "`aux_loss`, weight 0.01": {"balance": ["aux_loss"]},
    "`aux_loss`, weight 0.1": {"balance": [{"kind": "aux_loss", "weight": 0.1}]},
    "`bias`, rate 0.01": {"balance": [{"kind": "bias", "rate": 0.01}]},
    "`aux_loss`, weight 0.01, `capacity_factor` 1.25": {"balance": ["aux_loss"], "capacity_factor": 1.25},
}


def batch(seed: int, step: int) -> Batch:
    """Sequences of the task of `seed`; each step has others."""
    following = np.random.default_rng(seed).integers(0, VOCAB, (TOPICS, VOCAB, 4))
    draw = np.random.default_rng((seed, step + 1))
    topics = np.minimum(draw.geometric(0.5, BATCH) - 1, TOPICS - 1)
    tokens = np.empty((BATCH, SEQ + 1), np.int64)
    tokens[:, 0] = draw.integers(0, VOCAB, BATCH)
    for place in range(SEQ):
        tokens[:, place + 1] = following[topics, tokens[:, place], draw.integers(0, 4, BATCH)]
    return Batch(tokens[:, :-1], tokens[:, 1:], np.zeros((BATCH, SEQ), np.int32))


def run(options: dict[str, Any], seed: int, steps: int) -> tuple[float, float, float]:
    """(busiest / mean of the worst layer, visits dropped, loss), means of the last steps."""
    router = {"kind": "sigmoid", "top_k": TOP_K}
    moe = {"kind": "moe", "num_experts": EXPERTS, "intermediate_size": 32, "router": router, **options}
    shape = Shape(
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        intermediate_size=96,
        max_seq_len=64,
        feed_forward=(moe,),
    )
    model = build(shape.config(VOCAB), seed=seed)
    for layer in model.layers:  # the normed stream has a mean: nearly all tokens begin with the same experts
        layer.feed_forward.router.weight.data[:2] += 0.1
    trainer = Trainer(model, steps=steps, schedule=Cosine(warmup=min(10, steps)), optimizer=AdamW(lr=4e-3))
    found = []
    for step in range(steps):
        made = trainer.step(batch(seed, step))
        assert made.loads is not None
        row = made.loads.row()
        found.append((row["expert_load"], row["expert_drops"], made.loss))
    return tuple(fmean(column) for column in zip(*found[-LAST:], strict=True))  # type: ignore[return-value]


def main(arguments: list[str]) -> None:
    """Prints the table and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args(arguments)
    steps, seeds = given.steps, given.seeds
    if min(steps, seeds) < 1:
        parser.error("--steps and --seeds are at least 1")
    kept: list[dict[str, Any]] = []
    print("| balance | busiest / mean | visits dropped | loss, nats |\n|---|---|---|---|")
    for name, options in ARMS.items():
        rows = list(zip(*(run(options, seed, steps) for seed in range(seeds)), strict=True))
        forms = (".2f", ".1%", ".3f")
        shown = [
            f"{fmean(row):{form}} ({min(row):{form}} to {max(row):{form}})"
            for row, form in zip(rows, forms, strict=True)
        ]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
        figure = f"8 experts on skewed topics, busiest / mean after {steps} steps, balance {name.replace('`', '')}"
        note = f"{shown[0]}; visits dropped {shown[1]}; loss {shown[2]} nats"
        kept.append({"figure": figure, "value": fmean(rows[0]), "unit": "x", "n": seeds, "note": note})
    ledger.append("train", kept)


if __name__ == "__main__":
    main(sys.argv[1:])
