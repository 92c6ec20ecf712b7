"""Ways run on this machine: real steps, predictions corrected by what they took, and the ranking afterwards."""

from __future__ import annotations

import math

import pytest

from hone.base.errors import MachineError
from hone.base.run import Run
from hone.plan.search.executing import training
from hone.plan.search.executing.refit import executed, factors, seconds_of
from hone.plan.search.goal import Goal
from hone.plan.search.searching import search
from tests.plan.search.test_searching import LARGE, TINY

QUIET = Run(quiet=True)


@pytest.fixture(scope="module")
def found():
    return search(Goal.read({**TINY, "tokens": ["1M"]}), most=8)


def test_a_step_is_a_real_one(found):
    """Two different recomputations are the same training: equal losses, other seconds."""
    losses = []
    for recomputation in ("none", "full"):
        train = {**found.chosen.train, "recomputation": recomputation, "micro_batch": 4, "passes": 2}
        took = training.step_seconds(found.chosen.candidate, train, seq_len=128, device="cpu", steps=3, budget_s=30.0)
        assert took.num == 3 and 0 < took.fastest_s <= took.seconds and took.peak_bytes is None
        losses.append(took.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < math.log(512) * 1.1


def test_what_was_executed_has_its_own_seconds_and_others_those_of_their_kind(found):
    """Every measurement is twice its prediction, but for the first: then the second is the choice."""
    first = found.ways[0]

    def ask(way, goal, device):
        return seconds_of(way) * (3.0 if way is first else 2.0)

    again = executed(found, 3, QUIET, ask)
    assert again.chosen.label() != first.label() and again.chosen.evidence == "executed"
    assert again.chosen.measured["measured_s"] == pytest.approx(2 * again.chosen.measured["predicted_s"])
    assert any("corrected: train fp32 takes 2.000 times" in note for note in again.notes)
    before = {way.label(): way.train_hours for way in found.ways}
    for way in again.ways:
        if way.evidence != "executed":
            assert way.train_hours == pytest.approx(before[way.label()] * 2.0, rel=0.5)
    hours = [way.train_hours for way in again.ways]
    assert hours == sorted(hours)


def test_the_factor_of_a_kind_is_the_median_of_what_ran(found):
    from hone.plan.search.executing.refit import Pair

    ways = list(found.ways)
    pairs = {0: Pair("", 1.0, 2.0), 1: Pair("", 1.0, 3.0), 2: Pair("", 2.0, 8.0)}
    assert factors(pairs, ways)["train"] == 3.0


def test_ways_of_other_machines_are_not_executed_here():
    elsewhere = search(Goal.read(LARGE), most=1)
    with pytest.raises(MachineError, match="add here to machines"):
        executed(elsewhere, 1, QUIET)
    from hone.plan.search.executing.refit import measure

    with pytest.raises(MachineError, match="one device"):
        measure(elsewhere.chosen, elsewhere.goal, "cpu")


@pytest.mark.slow
def test_the_ledger_has_the_regret_of_the_ways_that_ran():
    """Four trainings of a tiny model, each run: every one is measured, and the regret in the ledger is the first's time over the least."""
    from benchmarks.plan_executed import candidates, exact, goal_of, measured, rows_of
    from hone.plan.search.searching import fleets_of, in_order, priced

    class Asked:
        goal, device, shape, rounds, steps, seconds, candidates, lines = "train", "cpu", "tiny", 1, 1, 60.0, 4, ""

    goal = goal_of(Asked).model_copy(update={"batch_size": (4,)})
    ways, _ = priced(goal, fleets_of(goal))
    picked = candidates(in_order(exact(ways, goal), goal), Asked.candidates)
    import time

    pairs = measured(picked, goal, Asked, time.perf_counter())
    rows = rows_of(picked, pairs, Asked)
    assert len(pairs) == 4 and all(pair.measured > 0 for pair in pairs.values())
    least = min(pair.measured for pair in pairs.values())
    assert rows[0]["value"] == pytest.approx(pairs[0].measured / least, rel=1e-3)


@pytest.mark.slow
def test_a_server_is_a_real_one():
    """An engine of random codes answers all requests, each with its whole number of tokens."""
    from hone.plan.search.executing import serving
    from hone.plan.search.goal import Requests
    from hone.plan.search.serving.formats import FORMATS
    from hone.plan.search.shapes import candidates_of

    (candidate,) = candidates_of(Goal.read(TINY))
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 32}
    took = serving.run(candidate, FORMATS["int8"], engine, Requests(prompt_tokens=16, output_tokens=8), device="cpu")
    assert took.num == 8 and took.tokens_per_s == pytest.approx(8 * 8 / took.seconds) and 0 < took.ttft_s < took.seconds
