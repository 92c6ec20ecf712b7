"""Direct preference optimization: how far it moves the margin between chosen and rejected answers, on pairs that it has not seen.

    python -m benchmarks.truths.preferences --model FOLDER --device cuda --workers 3 --out FILE;  ... --from FILE

A pair is the beginning of a stretch of text with its true continuation, chosen, and with the one that the given model writes at
temperature 1, rejected; trained pairs are of the calibration text, held-out ones of the held-out text. The margin, in nats, is beta
times how much more the trained model prefers the chosen answer than its reference, the given model, does: it begins at 0, and the
accuracy is the share of pairs above 0. A seed draws other stretches and continuations of both kinds.
Protocol: learning rate and steps are chosen with seed 100 (1e-5, 3e-5 and 1e-4 were tried; 1e-4); then seeds 0, 1, 2. Shown if the interval of the held-out margin is above 0 and that
of the accuracy above a half.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.truths import common
from hone.base.interval import half_width
from hone.feed.load import IGNORE, Batch
from hone.model.decoder import Decoder
from hone.model.hf import load
from hone.model.incremental import generate
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.preference.measure import held_out
from hone.train.optimizers.adamw import AdamW
from hone.train.schedules.cosine import Cosine

ARMS: dict[str, dict[str, Any]] = {"dpo": {"kind": "dpo", "beta": 0.1}}
SIZES = {
    "steps": 120,
    "pairs_a_step": 32,
    "pairs": 2048,
    "held_out_pairs": 1024,
    "prompt": 32,
    "answer": 32,
    "lr": 1e-4,
}


class Pairs:
    """Pairs as batches: a row holds one, its chosen answer and then its rejected one."""

    def __init__(self, model: Decoder, text: np.ndarray, count: int, seed: int, options: argparse.Namespace) -> None:
        starts = np.random.default_rng(seed).integers(0, len(text) - options.prompt - options.answer, count)
        chosen = np.stack([text[start : start + options.prompt + options.answer] for start in starts])
        prompts = torch.from_numpy(chosen[:, : options.prompt].copy()).to(model.device)
        written = generate(model, prompts, options.answer, temperature=1.0, seed=seed << 20).cpu().numpy()
        tokens = np.concatenate([chosen[:, :-1], written[:, :-1]], 1)
        targets = np.concatenate([chosen[:, 1:], written[:, 1:]], 1)
        half = tokens.shape[1] // 2
        for first in (0, half):
            targets[:, first : first + options.prompt - 1] = IGNORE
        ids = np.broadcast_to((np.arange(2 * half) >= half).astype(np.int32), tokens.shape)
        self.all = Batch(tokens, targets, ids.copy())

    def rows(self, which: np.ndarray) -> Batch:
        return Batch(*(array[which] for array in self.all))

    def in_order(self, batch_size: int, seq_len: int) -> Iterator[Batch]:
        """All of them, as `held_out` reads."""
        for first in range(0, len(self.all.tokens), batch_size):
            yield self.rows(np.arange(first, min(first + batch_size, len(self.all.tokens))))


def measure(arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """The margins of one training, before and after it."""
    precision, dtype = common.dtype_of(options)
    reference = load(options.model, options.device, dtype).eval().requires_grad_(False)
    trained, unseen = (
        Pairs(reference, common.tokens_of(options, name), count, 2 * seed + place, options)
        for place, (name, count) in enumerate((("calibration", options.pairs), ("heldout", options.held_out_pairs)))
    )
    trainer = Trainer(
        load(options.model, options.device, torch.float32), steps=options.steps, schedule=Cosine(warmup=10),
        optimizer=AdamW(lr=options.lr), objective=OBJECTIVES.read(ARMS[arm]), precision=precision, teacher=reference,
    )  # fmt: skip
    found = {}
    for when in ("before", "after"):
        if when == "after":
            draw = np.random.default_rng(seed)
            for _ in range(options.steps):
                trainer.step(trained.rows(draw.integers(0, options.pairs, options.pairs_a_step)))
        said = held_out(trainer, unseen, batch_size=128, seq_len=0)  # type: ignore[arg-type]
        found |= {f"{when}, {name}": value for name, value in said.items()}
    return found


def rows(found: common.Found, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Margin and accuracy on held-out pairs."""
    sizes, made = header["sizes"], []
    for arm in (one for one in found if common.enough(found, one)):
        for name, said, unit in (
            ("val_margin", "margin", "nats"),
            ("val_accuracy", "chosen answer preferred", "of pairs"),
        ):
            values = common.values_of(found, arm, f"after, {name}")
            made.append({
                "figure": f"{header['model']}: {arm}, {said}, held-out pairs", "value": statistics.fmean(values), "unit": unit,
                "n": len(values), "interval": half_width(values), "technique": f"objective/{arm}",
                "note": f"{sizes['steps']} steps of {sizes['pairs_a_step']} of {sizes['pairs']} pairs, lr {sizes['lr']:g}; {sizes['held_out_pairs']} held-out pairs "
                f"a seed; +- {half_width(values):.4f} (95 %, {len(values)} seeds); 0 before training",
            })  # fmt: skip
    return made


if __name__ == "__main__":
    from benchmarks.truths import preferences

    common.main(preferences, "truths")
