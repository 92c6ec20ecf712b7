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
    arms, rows = Arms(arguments), []
    best = {large: min(RATES, key=lambda lr: arms.scratch(large, lr, 0)) for large in LARGE}
    seeds = range(arguments.seeds)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            for arm, (large, _) in ARMS.items():
                arms.scratch(large, best[large], seed)
                arms.grown(arm, best[large], seed, Path(scratch))
        for large in LARGE:
            rows.append(_row(arms, large, best[large], [arms.scratch(large, best[large], seed) for seed in seeds]))
            for arm, (of, _) in ARMS.items():
                if of == large:
                    found = [arms.grown(arm, best[large], seed, Path(scratch)) for seed in seeds]
                    rows.append(_row(arms, large, best[large], [one[-1] for one in found], arm, found, rows[-1]))
                    rows[-1] |= _beside(
                        rows[-1].pop("_losses"), [arms.scratch(large, best[large], seed) for seed in seeds]
                    )
    print(ledger.table(rows))
    for row in rows:
        row.pop("_losses", None)
        print(row["figure"], row.get("note", ""))
    if not arguments.no_ledger:
        print(ledger.append("growth", rows, "cpu"))


def _row(
    arms: Arms, large: str, lr: float, losses: list[float], arm: str = "", found: Any = (), _: Any = None
) -> dict[str, Any]:
    arguments, config = arms.arguments, LARGE[large].config(VOCAB)
    total = 3 * arms.flops[large] * arguments.steps * SEQUENCES * SEQ_LEN
    what = f"{config.num_params:,} weights ({large}), {total:.3g} FLOPs in all"
    row: dict[str, Any] = {
        "figure": f"{what}: {arm or 'from scratch'}, validation loss",
        "value": statistics.mean(losses),
        "unit": "nats/byte",
        "n": len(losses),
        "lr": lr,
        "_losses": losses,
    }
    if len(losses) > 1:
        row["interval"] = half_width(losses)
    if not arm:
        return row | {
            "note": f"{arguments.steps} steps of {SEQUENCES} x {SEQ_LEN} bytes; lr {lr:g}, best of {RATES} at seed 0"
        }
    small, begun = (statistics.mean(one[at] for one in found) for at in (0, 1))
    at = f"of {SMALL.config(VOCAB).num_params:,} weights, {arms.small_steps} steps"
    note = f"from a model {at}, with loss {small:.4f}; grown {begun:.4f} before the {arms.steps_left(large)} steps of the larger one"
    return row | {"technique": f"growth/{ARMS[arm][1]['kind']}", "note": note}


def _beside(losses: list[float], scratch: list[float]) -> dict[str, Any]:
    """The comparison with training from scratch, by the differences of each seed."""
    mean = statistics.mean(scratch)
    found: dict[str, Any] = {"peer": "from scratch", "peer_value": mean, "ratio": statistics.mean(losses) / mean}
    if len(losses) > 1:
        by = paired(scratch, losses)
        found |= {"difference": by.by, "difference_interval": by.half}
    return found


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
