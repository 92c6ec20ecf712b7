"""Quantization-aware training in int4: how much it recovers of the loss that rounding costs.

    python -m benchmarks.truths.qat --model FOLDER --device cuda --workers 9 --out FILE;  ... --from FILE

The given model trains on its calibration text with rounded weights (one scale a row; a scale for each group of 128), without, and
with rounded weights and itself as the teacher; every arm makes the same steps on the same batches. Recovered is measured twice: of
the loss that rounding the given model costs, and (stricter) of what rounding costs the model that made as many steps in floats.
All losses are of the held-out text; a rounded model computes with the weights that `hone compress` stores (rtn, absmax).
Protocol: learning rates are chosen with seed 100 on the loss of the rounded model (1e-5 to 1e-3 were tried; on the text alone 3e-5, which is
that of the floats too, taught 1e-4); then seeds 0, 1, 2. Shown if an interval of the recovered share is above 0.4.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch

from benchmarks.truths import common
from hone.base.interval import half_width
from hone.eval.score import score
from hone.model.decoder import Decoder
from hone.model.hf import load
from hone.train import OBJECTIVES
from hone.train.loop import Trainer
from hone.train.optimizers.adamw import AdamW
from hone.train.quantization_aware import FAKE_QUANTIZERS
from hone.train.quantization_aware.linears import RoundedLinears
from hone.train.schedules.cosine import Cosine

GRIDS = {
    "row": {"kind": "integer", "bits": 4, "group_size": 0},
    "128": {"kind": "integer", "bits": 4, "group_size": 128},
}
FLOATS = "floats"
ARMS: dict[str, dict[str, Any]] = {FLOATS: {"kind": "next_token"}}
for _name, _grid in GRIDS.items():
    ARMS[f"rounded, {_name}"] = {"kind": "next_token", "quantization_aware": _grid}
    ARMS[f"rounded and taught, {_name}"] = {"kind": "distill", "alpha": 1.0, "quantization_aware": _grid}
SIZES = {
    "steps": 150, "rows_a_step": 32, "seq_len": 512, "lr": 3e-5, "taught_lr": 1e-4, "score_tokens": 200_000,
}  # fmt: skip


def measure(arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Losses of one training, and of the given model."""
    precision, dtype = common.dtype_of(options)
    held_out = common.tokens_of(options, "heldout")[: options.score_tokens]
    text = common.tokens_of(options, "calibration")

    def loss(model: Decoder, grid: str | None) -> float:
        if grid:
            model = copy.deepcopy(model)
            RoundedLinears(model, FAKE_QUANTIZERS.read(GRIDS[grid]))
        window = options.seq_len
        return score(model.eval(), held_out, window=window, join="stream", batch_tokens=max(window, 1 << 14)).mean_loss

    found: dict[str, float] = {}
    for grid in (None, *GRIDS) if arm == FLOATS else ():
        found[f"given, {grid}"] = loss(load(options.model, options.device, dtype), grid)
    model = load(options.model, options.device, torch.float32)
    objective = OBJECTIVES.read(ARMS[arm])
    teacher = load(options.model, options.device, dtype) if objective.from_teacher else None
    trainer = Trainer(
        model, steps=options.steps, schedule=Cosine(warmup=10), optimizer=AdamW(lr=options.lr if teacher is None else options.taught_lr), objective=objective,
        precision=precision, teacher=teacher,
    )  # fmt: skip
    for step in range(options.steps):
        trainer.step(common.drawn(text, seed, step, options.rows_a_step, options.seq_len))
    if arm == FLOATS:
        found["trained"] = loss(model, None)
        for grid in GRIDS:
            found[f"trained, {grid}"] = loss(model, grid)
    else:
        found["trained"] = loss(model, None)  # its linears round as they did in training
    return found


def rows(found: common.Found, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rows for each arm that trains with rounded weights: what it recovers of either loss."""
    sizes, made = header["sizes"], []
    for arm in found:
        if arm == FLOATS or not common.enough(found, arm) or FLOATS not in found:
            continue
        grid, lr = arm.rpartition(", ")[2], sizes["taught_lr" if "taught" in arm else "lr"]
        what = f"{sizes['steps']} steps of {sizes['rows_a_step']} x {sizes['seq_len']} tokens, lr {lr:g}"
        given = found[FLOATS][common.seeds_of(found, FLOATS)[0]]  # the model with which all seeds begin
        for told, beside, names in (
            ("the given model", (), ("given, None", f"given, {grid}")),
            ("the model of as many steps in floats", (FLOATS,), ("trained", f"trained, {grid}")),
        ):
            if not common.enough(found, arm, *beside):
                continue
            after = common.values_of(found, arm, "trained", *beside)
            whole, cost = (
                common.values_of(found, FLOATS, name, arm) if beside else [given[name]] * len(after) for name in names
            )
            shares = [(two - three) / (two - one) for one, two, three in zip(whole, cost, after, strict=True)]
            made.append({
                "figure": f"{header['model']}: recovered of what int4 ({_scales(grid)}) costs {told}, {arm.rpartition(', ')[0]}, {what}",
                "value": statistics.fmean(shares), "unit": "of the lost loss", "n": len(shares), "interval": half_width(shares),
                "technique": "fake quantizer/integer",
                "note": f"held-out loss {statistics.fmean(whole):.4f}, rounded {statistics.fmean(cost):.4f}, trained {statistics.fmean(after):.4f} "
                f"+- {half_width(after):.4f} nats; +- {half_width(shares):.3f} of the share (95 %, {len(shares)} seeds)",
            })  # fmt: skip
    return made


def _scales(grid: str) -> str:
    return "a scale a row" if grid == "row" else f"groups of {grid}"


if __name__ == "__main__":
    from benchmarks.truths import qat

    common.main(qat, "truths")
