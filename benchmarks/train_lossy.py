"""What data parallelism that sends less costs in quality: the validation loss after a fixed number of steps on real text, 2 ranks.

    python -m benchmarks.train_lossy BOOK.txt.gz ... [--steps 300] [--seeds 3]

Bytes of the text are the tokens; the last book is validation only. Every technique gets the same model, batches, steps and learning
rate, which were not tuned for any of them; with `ddp` the ranks compute what one process would.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ranks import on_ranks
from hone.base.ranks import Mesh
from hone.feed.load import Batch
from hone.model.context import Causal
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.ops import linear_cross_entropy
from hone.train.optimizers.adamw import AdamW
from hone.train.parallelism import Parallelism
from hone.train.schedules.cosine import Cosine

KINDS: dict[str, Any] = {
    "ddp": "ddp",
    "bf16_gradients": "bf16_gradients",
    "zero_plus_plus": "zero_plus_plus",
    "powersgd": "powersgd",
    "local_sgd": "local_sgd",
    "diloco": "diloco",
}
SHAPE = Shape(hidden_size=96, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=256, max_seq_len=128)
SEQ_LEN, SEQUENCES, VOCAB, LR = 128, 8, 256, 2e-3


def main() -> None:
    """Starts two ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    on_ranks("train_lossy", _arguments(), _work)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every technique with every seed; rank 0 writes the rows."""
    torch.set_num_threads(1)
    mesh = Mesh.from_environment()
    books = [np.frombuffer(gzip.open(path).read(), np.uint8) for path in arguments.text]
    train, val = np.concatenate(books[:-1]), books[-1]
    losses: dict[str, list[float]] = {name: [] for name in KINDS}
    with mesh.together():
        for seed in range(arguments.seeds):
            for name, kind in KINDS.items():
                losses[name].append(_trained(kind, mesh, train, val, seed, arguments.steps))
                if mesh.leads:
                    print(f"seed {seed}: {name} {losses[name][-1]:.4f}", flush=True)
    if mesh.leads:
        arguments.out.write_text(json.dumps(_rows(losses, len(train), arguments)))


def _trained(kind: Any, mesh: Mesh, train: np.ndarray, val: np.ndarray, seed: int, steps: int) -> float:
    """Validation loss (nats a byte) of a training with technique `kind`."""
    shared = Parallelism.read({"data_parallel": kind})
    ranks = shared.ranks(mesh, "cpu")
    model = build(SHAPE.config(VOCAB), seed=seed)
    options = {"schedule": Cosine(warmup=20), "optimizer": AdamW(lr=LR), "ranks": ranks}
    trainer = shared.data_parallel.trainer()(model, steps=steps, **options)
    draw, (index, parts) = np.random.default_rng(seed), ranks.data
    for _ in range(steps):
        starts = draw.integers(0, len(train) - SEQ_LEN - 1, SEQUENCES * parts)
        trainer.step(bytes_of(train, starts[index * SEQUENCES : (index + 1) * SEQUENCES]))
    starts = np.linspace(0, len(val) - SEQ_LEN - 1, 256).astype(np.int64)
    total = 0.0
    with torch.no_grad(), mesh.transfers():
        for part in np.split(starts, 8):
            batch = bytes_of(val, part)
            tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
            x = model.head_input(model.hidden(tokens, Causal(tokens)))
            total += float(linear_cross_entropy(x, model.head_weight, targets)) / 8
    return total


def bytes_of(text: np.ndarray, starts: np.ndarray) -> Batch:
    """The SEQ_LEN bytes from each of `starts` on, as sequences of one document each."""
    rows = np.stack([text[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
    return Batch(rows[:, :-1], rows[:, 1:], np.zeros((len(rows), SEQ_LEN), np.int32))


def _rows(losses: dict[str, list[float]], train_bytes: int, arguments: argparse.Namespace) -> list[dict]:
    """A row a technique: mean validation loss, beside ddp's in the same run."""
    rows, params = [], SHAPE.config(VOCAB).num_params
    what = f"{params:,} weights on 2 ranks, {arguments.steps} steps of 2 x {SEQUENCES} x {SEQ_LEN} bytes of {len(arguments.text) - 1} books"
    for name, found in losses.items():
        between = max(found) - min(found)
        against = [one - other for one, other in zip(found, losses["ddp"], strict=True)]
        note = f"validation: a book that is not trained on ({Path(arguments.text[-1]).name}); range over seeds {between:.3f}"
        if name != "ddp":
            note += f"; more than ddp, each seed: {', '.join(f'{one:+.4f}' for one in against)}"
        row = {"figure": f"{what}: {name}, validation loss", "value": statistics.mean(found), "unit": "nats/byte"}
        rows.append({**row, "n": len(found), "technique": f"data parallelism/{name}", "note": note})
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="gzipped texts, at least two; the last one is for validation")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(ranks=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
