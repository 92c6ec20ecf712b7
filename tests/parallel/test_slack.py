"""Slower clocks for passes with slack: never a longer step, against every combination on small tables, and on a published profile."""

from __future__ import annotations

import itertools
import random

import pytest

from hone.base.errors import SpecError
from hone.cost.pipeline.simulate import Costs, simulate
from hone.parallel.pipeline.schedules.gpipe import gpipe
from hone.parallel.pipeline.schedules.interleaved import interleaved
from hone.parallel.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from hone.parallel.pipeline.slack import Choice, exact, fastest, stretch
from tests.measure.clocks.perseus import A100_FORWARD

SMALL = [gpipe(2, 2), one_forward_one_backward(2, 2), one_forward_one_backward(3, 1)]


def drawn(table, seed: int, settings: int = 2) -> dict:
    """For every kind and stage so many settings, slower ones cheaper."""
    draw = random.Random(seed)
    found = {}
    for key in sorted({(turn.op.kind, turn.op.stage) for turn in table.turns}):
        time_s, energy_j = draw.uniform(1, 3), draw.uniform(5, 10)
        found[key] = [Choice(time_s, energy_j)]
        for _ in range(settings - 1):
            time_s, energy_j = time_s * draw.uniform(1.05, 1.6), energy_j * draw.uniform(0.7, 0.97)
            found[key].append(Choice(time_s, energy_j))
    return found


def brute_force(table, choices, deadline: float, waiting_w: float) -> float:
    """The least joules of all combinations that keep the deadline."""
    turns, best = table.turns, float("inf")
    for taken in itertools.product(*(choices[turn.op.kind, turn.op.stage] for turn in turns)):
        ends: list[float] = []
        for turn, one in zip(turns, taken, strict=True):
            begin = max([ends[turn.before] if turn.before >= 0 else 0.0, *(ends[other] for other in turn.sent)])
            ends.append(begin + one.time_s)
        seconds = max(ends)
        if seconds <= deadline + 1e-9:
            waiting = seconds * len(table.ranks) - sum(one.time_s for one in taken)
            best = min(best, sum(one.energy_j for one in taken) + waiting_w * waiting)
    return best


@pytest.mark.parametrize("table", SMALL, ids=lambda one: f"{one.name}-{len(one.turns)}")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slower", "waiting_w"), [(0.0, 0.0), (0.1, 0.5)])
def test_against_every_combination(table, seed, slower, waiting_w):
    choices = drawn(table, seed)
    first = fastest(table, choices, waiting_w)
    deadline = first.seconds * (1 + slower)
    least = brute_force(table, choices, deadline, waiting_w)
    best = exact(table, choices, slower=slower, waiting_w=waiting_w)
    assert best.seconds <= deadline + 1e-6
    assert best.energy_j == pytest.approx(least, rel=1e-6)
    greedy = stretch(table, choices, slower=slower, waiting_w=waiting_w)
    assert greedy.seconds <= deadline + 1e-9
    assert least - 1e-9 <= greedy.energy_j <= first.energy_j
    assert first.energy_j - greedy.energy_j >= 0.6 * (first.energy_j - least)


def test_the_greedy_choice_is_near_the_best_on_larger_tables():
    table = one_forward_one_backward(3, 4)
    saved = []
    for seed in range(3):
        choices = drawn(table, seed, settings=3)
        first = fastest(table, choices)
        best, greedy = exact(table, choices), stretch(table, choices)
        assert best.energy_j <= greedy.energy_j + 1e-9 and greedy.seconds == pytest.approx(first.seconds)
        saved.append((first.energy_j - greedy.energy_j) / (first.energy_j - best.energy_j))
    assert sum(saved) / len(saved) > 0.85


def test_simulate_plays_the_same_seconds():
    table = interleaved(2, 4)
    choices = {(kind, stage): [Choice(1.0 + stage, 1.0)] for kind in "FB" for stage in range(4)}
    costs = Costs(forward=[1.0, 2.0, 3.0, 4.0], inputs=[0.5, 1.0, 1.5, 2.0], weights=[0.5, 1.0, 1.5, 2.0])
    assert fastest(table, choices).seconds == pytest.approx(simulate(table, costs).seconds)


def test_a_published_profile_saves_as_published():
    """Perseus' A100 profile, 4 stages of which one takes a tenth longer, 8 microbatches: passes with slack save 4 to 26 % of their
    energy, and the step stays as long. EnvPipe publishes up to 25.2 % on four GPUs, Perseus up to 30 %."""
    table = one_forward_one_backward(4, 8)
    choices = {}
    for stage in range(4):
        slow = 1.1 if stage == 3 else 1.0
        settings = [Choice(slow * one.time_s, slow * one.energy_j, one.mhz) for one in A100_FORWARD]
        choices["F", stage] = settings
        choices["B", stage] = [Choice(1.85 * one.time_s, 1.85 * one.energy_j, one.setting) for one in settings]
    first = fastest(table, choices, waiting_w=100.0)
    found = stretch(table, choices, waiting_w=100.0)
    assert found.seconds == pytest.approx(first.seconds)
    assert 0.04 < 1 - found.energy_j / first.energy_j < 0.26
    last = {
        one.setting for turn, one in zip(table.turns, found.taken, strict=True) if turn.op.stage == 3 and turn.rank == 3
    }
    cheapest = min(choices["F", 0], key=lambda one: one.energy_j - 100.0 * one.time_s).setting
    assert last == {1410} and min(one.setting for one in found.taken) >= cheapest


def test_a_pass_without_settings_is_named():
    with pytest.raises(SpecError, match="no settings are given for F of stage 1"):
        stretch(gpipe(2, 1), {("F", 0): [Choice(1, 1)], ("B", 0): [Choice(1, 1)], ("B", 1): [Choice(1, 1)]})
