"""GRPO on a task whose answers can be verified: the mean reward before and after it, of answers that are only measured.

    python -m benchmarks.truths.rewards --model FOLDER --device cuda --workers 6 --out FILE;  ... --from FILE

The task of `benchmarks.rollouts`: sums of two digits up to 3, worth 1.2 when right and 0.2 for another digit. Two models: the small one of that
benchmark with random weights, and the given one. Each first reads some steps of questions with answers, so that some of
its own are right; then GRPO makes `--steps` steps. Before and after, the model writes `--answers` answers at temperature 1 to each of the
sixteen questions, of which no step is made: the growth is the difference of their mean rewards, not that of single steps, whose noise
hid it earlier (+0.025 +- 0.049 of three seeds of 60 steps).
Protocol: the small model's rate is that of `benchmarks.rollouts`, its steps were set before seeds 0, 1, 2 ran; pilots of other rates and
starts have seed 100. Shown if the interval of the growth is above 0.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rollouts import REWARDS, SHAPE, sums
from benchmarks.truths import common
from hone.base.interval import half_width, paired
from hone.model.decoder import build
from hone.model.hf import load
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.objectives.base import Setting
from hone.train.optimizers.adamw import AdamW
from hone.train.rollouts.groups import Rollouts, prompts_of
from hone.train.schedules.cosine import Cosine

SMALL, GIVEN = "a small model", "the given model"
ARMS: dict[str, dict[str, float]] = {
    SMALL: {"first_steps": 40, "first_lr": 4e-3, "lr": 1e-3},
    GIVEN: {"first_steps": 8, "first_lr": 3e-4, "lr": 3e-5},
}
PILOTS = {
    f"{name}, {steps} first, lr {lr:g}": {**ARMS[name], "first_steps": steps, "lr": lr}
    for name, sizes, rates in ((SMALL, (20, 40), (1e-3, 4e-3)), (GIVEN, (4, 8), (3e-5, 1e-4)))
    for steps in sizes
    for lr in rates
}
"""Those of seed 100."""
SIZES = {"steps": 80, "rows_a_step": 2, "answers": 128}
LENGTH = 128


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the option of this module."""
    said = "folder of an earlier run's data, for machines without what data stages need; made where it is not there"
    parser.add_argument("--data", type=Path, help=said)


def measure(arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """The mean reward before and after one training."""
    precision, rates = common.dtype_of(options)[0], {**ARMS, **PILOTS}[arm]
    first = int(rates["first_steps"])
    with tempfile.TemporaryDirectory() as scratch:
        kept = options.data or Path(scratch)
        if arm.startswith(SMALL):
            data = sums(kept / "small")
            model = build(SHAPE.config(data.vocab_size, eos=data.eos_token_id), device=options.device, seed=seed)
        else:
            data = sums(kept / "given", {"path": str(options.model)})
            model = load(options.model, options.device, torch.float32)
        taught = Trainer(model, steps=first, schedule=Cosine(warmup=3), optimizer=AdamW(lr=rates["first_lr"]))
        for step in range(first):
            taught.step(data.batch(step, 4, LENGTH, seed))
        given = {"kind": "grpo", "num_generations": 16, "max_completion_length": 4, "rewards": REWARDS}
        trainer = Trainer(
            model.float(), steps=options.steps, schedule=Cosine(warmup=3), precision=precision,
            optimizer=AdamW(lr=rates["lr"]), objective=OBJECTIVES.read(given), setting=Setting(data.folder, seed),
        )  # fmt: skip
        found = {"before": rewarded(trainer, data, options.answers)}
        for step in range(options.steps):
            trainer.step(data.batch(step, options.rows_a_step, LENGTH, seed))
            if step % 20 == 19:
                found[f"reward of step {step + 1}"] = trainer.preparer.row["reward"]  # type: ignore[union-attr]
        return {**found, "after": rewarded(trainer, data, options.answers)}


def rewarded(trainer: Trainer, data: Any, number: int) -> float:
    """The mean reward of `number` answers to each question."""
    preparer = trainer.preparer
    assert isinstance(preparer, Rollouts)
    every = {
        one.tokens.tobytes(): one for one in prompts_of(data.cut(np.arange(data.num_sequences(LENGTH)), LENGTH), LENGTH)
    }
    answers = preparer.written(trainer, [*every.values()], LENGTH, number, 1.0, step=10**6)
    return float(preparer.rewarded([*every.values()], answers)[0].mean())


def rows(found: common.Found, header: dict[str, Any]) -> list[dict[str, Any]]:
    """How much the reward grew, of either model."""
    sizes, made = header["sizes"], []
    for arm in (one for one in found if common.enough(found, one)):
        before, after = (common.values_of(found, arm, name) for name in ("before", "after"))
        grown = paired(before, after)
        name = header["model"] if arm == GIVEN else "hidden 64, 2 layers"
        made.append({
            "figure": f"{name}: GRPO, mean reward of a sum of digits", "value": statistics.fmean(after), "unit": "of 1.2", "n": len(after),
            "interval": half_width(after), "peer": "before GRPO", "peer_value": statistics.fmean(before), "difference": grown.by,
            "difference_interval": grown.half, "technique": "objective/grpo",
            "note": f"grew by {grown.by:+.4f} +- {grown.half:.4f} (95 %, {len(after)} seeds); {sizes['steps']} steps of {sizes['rows_a_step']} rows of questions, 16 answers each, after "
            f"{ARMS[arm]['first_steps']} steps on answers; lr {ARMS[arm]['lr']:g}; {sizes['answers']} measured answers a question",
        })  # fmt: skip
    return made


if __name__ == "__main__":
    from benchmarks.truths import rewards

    common.main(rewards, "truths", rewards.options)
