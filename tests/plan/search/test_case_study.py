"""The case study at 70B on 1,024 GPUs: its plan against hand arithmetic of the guides."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hone.cli.goals.show import step_said
from hone.cost.catalogue.read import catalogue
from hone.plan.search.exact import simulated
from hone.plan.search.goal import Goal
from hone.plan.search.searching import fleets_of, priced

FILE = Path(__file__).parents[3] / "recipes" / "goals" / "case_study_70b.yaml"
PLAIN = {
    "goal": "train", "space.precision": ["bf16"], "space.recomputation": ["full"], "space.schedules": ["1f1b"], "space.micro_batch": [1],
}  # fmt: skip
"""The unoptimized training: everything recomputed, in bf16, 1F1B."""
OPTIMIZED = {"space.precision": ["fp8"], "space.recomputation": ["none"], "space.schedules": ["interleaved"]}


@cache
def way_of(optimized: bool = False):
    """The plan of the one training."""
    more = OPTIMIZED if optimized else {}
    goal = Goal.load(FILE)
    space = {name.removeprefix("space."): value for name, value in {**PLAIN, **more}.items() if name != "goal"}
    fields = goal.model_dump(mode="json", exclude_unset=True)
    goal = Goal.read({**fields, "goal": "train", "space": {**fields["space"], **space}})
    (way,) = priced(goal, fleets_of(goal))[0]
    return simulated(way, goal)


def test_the_plan_of_the_full_case_study_is_the_arithmetic_of_the_guides():
    way = way_of()
    assert way.candidate.dims.num_params == pytest.approx(68.86e9, rel=1e-4)
    assert way.label().startswith("dp 32 zero1, tp 8, pp 4") and way.fleet.count == 1024 == 32 * 8 * 4
    # Weights 2 B, gradients 4 B and 12 B of Adam over the 32 ranks, of a 32nd of the weights: the rest are activations and the ends.
    states = 68.86e9 / (8 * 4) * (2 + 4 + 12 / 32)
    assert states < way.train_bytes < 80e9
    # 6 operations a weight and token, 2 more recomputed, at the rate of a data sheet's part; 32 micro-batches wait for 3 stages.
    tokens = 1024 * 4096
    flops = 8 * 68.86e9 * tokens
    rate = 0.8 * catalogue().accelerator("H100").flops_per_s["bfloat16"] * 1024
    assert flops / rate * (1 + 3 / 32) < way.step_s < 2 * flops / rate * (1 + 3 / 32), "attention, transfers"
    assert way.train_hours == pytest.approx(math.ceil(5e12 / tokens) * way.step_s / 3600, rel=1e-6)


def test_its_money_energy_and_grams_follow_from_a_step():
    way = way_of()
    hours, axes = way.train_hours, replace(way, serve_hours=0.0).axes()
    assert axes["dollars"] == pytest.approx(hours * 1024 * 2.5)
    assert axes["joules"] == pytest.approx(hours * 3600 * 1024 * 700)  # watts of the data sheet
    assert axes["grams"] == pytest.approx(axes["joules"] / 3.6e6 * 400)
    said = step_said(way)
    grams = way.step_s * 1024 * 700 / 3.6e6 * 400
    assert f"{grams:,.4g} g CO2" in said and f"${way.step_s / 3600 * 1024 * 2.5:,.3g}" in said


def test_the_optimized_training_is_faster_than_the_unoptimized_one():
    plain = way_of()
    better = way_of(optimized=True)
    assert 1.5 < plain.step_s / better.step_s < 8 / 6 * 1.9, "no recomputation, fp8 and a fourth of the bubble"
    assert plain.train_bytes < better.train_bytes < better.fleet.memory_bytes
