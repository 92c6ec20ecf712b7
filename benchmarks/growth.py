"""Models that grow against models from scratch at equal total FLOPs: the validation loss on real text.

    python -m benchmarks.growth BOOK.txt.gz ... [--steps 400] [--seeds 3]

Bytes of the text are the tokens; the last book is validation only. One small model a seed, trained with a constant learning rate, is grown
by every technique to one of two larger ones, twice as deep or twice as wide, and trained on with a cosine for the FLOPs that are left of those
that the larger one has from scratch in `--steps` steps. Every arm has the learning rate, of two, with which the first seed from
scratch does best. Runs that are done are kept in `--kept`, from which an interrupted comparison goes on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import ledger
from benchmarks.train_lossy import SEQ_LEN, VOCAB, bytes_of
from hone.base.interval import half_width, paired
from hone.model.context import Causal
from hone.model.decoder import Decoder, build
from hone.model.growth import GROWTHS
from hone.model.growth.base import grown_checkpoint
from hone.model.hf import Checkpoint, save
from hone.model.shape import Shape
from hone.ops import linear_cross_entropy
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine
from hone.train.schedules.wsd import WarmupStableDecay

SMALL = Shape(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=176, max_seq_len=128)
LARGE = {
    "deep": SMALL.model_copy(update={"num_layers": 4}),
    "wide": SMALL.model_copy(
        update={"hidden_size": 128, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "intermediate_size": 352}
    ),
}
_WIDE = {"hidden_size": 128, "num_heads": 8, "intermediate_size": 352}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "stack": ("deep", {"kind": "stack"}),
    "block_expansion": ("deep", {"kind": "block_expansion", "num_layers": 4}),
    "net2net": ("wide", {"kind": "net2net", **_WIDE}),
    "net2net, even shares": ("wide", {"kind": "net2net", **_WIDE, "shares": "even"}),
    "bert2bert": ("wide", {"kind": "bert2bert", **_WIDE}),
    "zero_expansion": ("wide", {"kind": "zero_expansion", **_WIDE}),
}
RATES, SEQUENCES, WARMUP = (2e-3, 4e-3), 8, 20


class Arms:
    """The runs, with what is kept of them by name."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        books = [np.frombuffer(gzip.open(path).read(), np.uint8) for path in arguments.text]
        self.train, self.val = np.concatenate(books[:-1]), books[-1]
        self.done: dict[str, Any] = json.loads(arguments.kept.read_text()) if arguments.kept.exists() else {}
        self.flops = {name: shape.config(VOCAB).flops_per_token(SEQ_LEN) for name, shape in LARGE.items()}
        self.small_flops = SMALL.config(VOCAB).flops_per_token(SEQ_LEN)
        self.small_steps = round(arguments.share * arguments.steps * self.flops["deep"] / self.small_flops)

    def steps_left(self, large: str) -> int:
        """Steps of the larger model after those of the small one, for the FLOPs of `--steps` from scratch."""
        return int(self.arguments.steps - self.small_steps * self.small_flops / self.flops[large])

    def kept(self, key: str, value: Any) -> Any:
        self.done[key] = value
        self.arguments.kept.write_text(json.dumps(self.done))
        print(key, value, flush=True)
        return value

    def scratch(self, large: str, lr: float, seed: int) -> float:
        """The loss of the larger model from scratch."""
        key = f"{large} scratch {lr:g} {seed} {self.arguments.steps}"
        if key in self.done:
            return self.done[key]
        model = build(LARGE[large].config(VOCAB), seed=seed)
        self.fit(model, self.arguments.steps, Cosine(warmup=WARMUP), lr, seed)
        return self.kept(key, self.loss(model))

    def grown(self, arm: str, lr: float, seed: int, folder: Path) -> list[float]:
        """Losses of the small model, of the grown one before its first step, and at the end."""
        key = f"{arm} {lr:g} {seed} {self.arguments.steps} {self.arguments.share:g}"
        if key in self.done:
            return self.done[key]
        large, options = ARMS[arm]
        model = grown_checkpoint(Checkpoint(self.small(lr, seed, folder)), [GROWTHS.read(options)], seed).build(
            dtype=torch.float32
        )
        assert model.config == LARGE[large].config(VOCAB)
        begun = self.loss(model)
        before = self.done[f"small {lr:g} {seed} {self.arguments.steps} {self.arguments.share:g}"]
        self.fit(model, self.steps_left(large), Cosine(warmup=WARMUP), lr, seed, first=self.small_steps)
        return self.kept(key, [before, begun, self.loss(model)])

    def small(self, lr: float, seed: int, folder: Path) -> Path:
        """The folder of the small model."""
        name = f"small {lr:g} {seed} {self.arguments.steps} {self.arguments.share:g}"
        if not (folder / name).exists():
            model = build(SMALL.config(VOCAB), seed=seed)
            self.fit(model, self.small_steps, WarmupStableDecay(warmup=WARMUP, decay=0), lr, seed)
            save(model, folder / name)
            self.kept(name, self.loss(model))
        return folder / name

    def fit(self, model: Decoder, steps: int, schedule: Any, lr: float, seed: int, first: int = 0) -> None:
        """Trains on the batches from number `first` on, the same for all arms of a seed."""
        trainer = Trainer(model, steps=steps, schedule=schedule, optimizer=AdamW(lr=lr))
        for step in range(first, first + steps):
            draw = np.random.default_rng((seed, step))
            trainer.step(bytes_of(self.train, draw.integers(0, len(self.train) - SEQ_LEN - 1, SEQUENCES)))

    @torch.no_grad()
    def loss(self, model: Decoder) -> float:
        """Validation loss, nats a byte."""
        total = 0.0
        for part in np.split(np.linspace(0, len(self.val) - SEQ_LEN - 1, 256).astype(np.int64), 8):
            batch = bytes_of(self.val, part)
            tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
            x = model.head_input(model.hidden(tokens, Causal(tokens)))
            total += float(linear_cross_entropy(x, model.head_weight, targets)) / 8
        return total


def main() -> None:
    """Trains every arm of every seed, prints the table, adds it to the ledger."""
    arguments = _arguments()
    torch.set_num_threads(1)
    arms, seeds = Arms(arguments), range(arguments.seeds)
    best = {large: min((arms.scratch(large, lr, 0), lr) for lr in RATES)[1] for large in LARGE}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for arm, (large, _) in ARMS.items():
                arms.scratch(large, best[large], seed)
                arms.grown(arm, best[large], seed, Path(folder))
        rows = []
        for large, lr in best.items():
            scratch = [arms.scratch(large, lr, seed) for seed in seeds]
            rows.append(_row(arms, large, lr, "from scratch", scratch))
            for arm, (of, _) in ARMS.items():
                if of == large:
                    found = [arms.grown(arm, lr, seed, Path(folder)) for seed in seeds]
                    rows.append(
                        _row(arms, large, lr, arm, [one[-1] for one in found]) | _beside(arms, arm, found, scratch)
                    )
    print(ledger.table(rows))
    for row in rows:
        print(f"{row['figure']}: {row['note']}")
    if not arguments.no_ledger:
        print(ledger.append("growth", rows, "cpu"))


def _row(arms: Arms, large: str, lr: float, arm: str, losses: list[float]) -> dict[str, Any]:
    """The ledger's row of one arm."""
    steps, config = arms.arguments.steps, LARGE[large].config(VOCAB)
    total = 3 * arms.flops[large] * steps * SEQUENCES * SEQ_LEN
    row = {
        "figure": f"{config.num_params:,} weights ({large}), {total:.3g} FLOPs in all: {arm}, validation loss",
        "value": statistics.mean(losses),
        "unit": "nats/byte",
        "n": len(losses),
        "lr": lr,
        "note": f"{steps} steps of {SEQUENCES} x {SEQ_LEN} bytes; lr {lr:g}, the better of {RATES} at seed 0 from scratch",
    }
    return row | ({"interval": half_width(losses)} if len(losses) > 1 else {})


def _beside(arms: Arms, arm: str, found: list[list[float]], scratch: list[float]) -> dict[str, Any]:
    """The comparison with training from scratch, by the differences of each seed, and what was before."""
    large, options = ARMS[arm]
    small, begun, end = (statistics.mean(one[at] for one in found) for at in range(3))
    what = (
        f"from a model of {SMALL.config(VOCAB).num_params:,} weights after {arms.small_steps} steps, loss {small:.4f}"
    )
    row = {
        "technique": f"growth/{options['kind']}",
        "peer": "from scratch",
        "peer_value": statistics.mean(scratch),
        "ratio": end / statistics.mean(scratch),
        "note": f"{what}; grown {begun:.4f}, then {arms.steps_left(large)} steps",
    }
    if len(found) > 1:
        by = paired(scratch, [one[-1] for one in found])
        row |= {"difference": by.by, "difference_interval": by.half}
        row["note"] += f"; difference {by.by:+.4f}, 95 % interval +-{by.half:.4f} (of pairs of seeds)"
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="books, gzip; the last is for validation")
    parser.add_argument("--steps", type=int, default=400, help="steps from scratch, whose FLOPs every arm has")
    parser.add_argument("--share", type=float, default=0.2, help="share of the deep model's FLOPs for the small one")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", type=Path, default=Path("growth.json"), help="file of the runs that are done")
    parser.add_argument("--no-ledger", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
