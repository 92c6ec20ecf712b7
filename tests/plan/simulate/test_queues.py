"""The simulator against what queueing theory proves, and against a slow simulation without events."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.plan.simulate.events import EventLoop
from hone.plan.simulate.figures import Goal, attainment, figures, littles_gap, to_csv
from hone.plan.simulate.replica import EngineSizes
from hone.plan.simulate.run import Conduct, simulate
from hone.plan.simulate.traces import Trace, synthetic
from tests.plan.simulate.fixed import FixedSteps

ONE_SERVER = EngineSizes(64, 16, 1, 16, 64, enable_prefix_caching=False)
"""One request at a time, each one step: a single server with first come, first served."""
SMALL = EngineSizes(60, 16, 8, 64, 512)


class BySize:
    """Seconds that grow with a step's tokens and sequences."""

    def step_s(self, kind, *, again=False):
        return 0.01 + 1e-4 * kind.num_tokens + 2e-4 * kind.decoding


def queue(rate: float, draw, count: int = 12_000, seed: int = 1):
    trace = synthetic("poisson", rate, count, (1, 1), (1, 1), seed=seed)
    return simulate(trace, ONE_SERVER, FixedSteps(draw))


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_md1_waits_as_pollaczek_and_khinchine_say(load):
    run = queue(load, lambda: 1.0)
    waits = [one.queue_s for one in run.served]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.12)


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_mm1_takes_one_over_mu_less_lambda(load):
    draw = random.Random(5)
    run = queue(load, lambda: draw.expovariate(1.0))
    assert np.mean([one.e2e_s for one in run.served]) == pytest.approx(1 / (1 - load), rel=0.12)
    assert np.mean([one.queue_s for one in run.served]) == pytest.approx(load / (1 - load), rel=0.12)


def test_a_server_is_lindleys_recursion_request_by_request():
    draw, again = random.Random(3), random.Random(3)
    trace = synthetic("gamma", 0.7, 2000, (1, 1), (1, 1), cv=3.0, seed=2)
    run = simulate(trace, ONE_SERVER, FixedSteps(lambda: draw.expovariate(1.0)))
    free = 0.0
    for arrival, one in zip(trace.arrivals, run.served, strict=True):
        begins = max(arrival.time_s, free)
        free = begins + again.expovariate(1.0)
        assert one.started_s == pytest.approx(begins) and one.last_s == pytest.approx(free)


@given(
    rate=st.floats(0.5, 40),
    cv=st.floats(0.3, 4),
    seed=st.integers(0, 99),
    replicas=st.integers(1, 3),
    ahead=st.integers(0, 1),
)
@settings(max_examples=25, deadline=None)
def test_every_run_keeps_the_laws(rate, cv, seed, replicas, ahead):
    """Little's law, work conservation, every token counted once, pages all free in the end, the same run twice."""
    trace = synthetic("gamma", rate, 60, (1, 200), (1, 40), cv=cv, seed=seed)
    sizes = EngineSizes(60, 16, 8, 64, 512, steps_ahead=ahead)
    conduct = Conduct(replicas=replicas)
    run = simulate(trace, sizes, BySize(), conduct)
    assert littles_gap(run) < 1e-9
    assert run.unfinished == 0
    for one in run.served:
        assert one.arrived_s <= one.started_s < one.first_s <= one.last_s
    counts = [member.replica.counts for member in run.fleet.members]
    assert sum(one.output_tokens for one in counts) == sum(one.output_tokens for one in trace.arrivals)
    assert sum(one.busy_s for one in counts) <= replicas * run.end_s + 1e-9
    recomputed = sum(one.tokens for one in counts) - sum(
        one.prompt_tokens + one.output_tokens - 1 for one in trace.arrivals
    )
    assert recomputed >= 0 if any(one.preemptions for one in run.served) else recomputed == 0
    for member in run.fleet.members:
        pool = member.replica.scheduler.pages.pool
        pool.check()
        assert pool.num_free == pool.num_pages
    assert to_csv(simulate(trace, sizes, BySize(), conduct).served) == to_csv(run.served)


def test_a_device_with_work_is_never_idle():
    """Work conservation: while a request is in the system, the device computes."""
    trace = synthetic("poisson", 6, 120, (1, 100), (1, 20), seed=4)
    run = simulate(trace, SMALL, BySize())
    spans = sorted((one.arrived_s, one.last_s) for one in run.served)
    busy, end = 0.0, -1.0
    for begins, ends in spans:
        busy += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    assert run.fleet.members[0].replica.counts.busy_s == pytest.approx(busy)


def test_more_requests_a_second_are_never_served_sooner():
    """Same lengths, gaps in proportion: with a higher rate the mean latency does not fall, and fewer meet a goal."""
    means, parts = [], []
    for rate in (1, 2, 4, 8, 16, 32):
        run = simulate(synthetic("poisson", rate, 300, (50, 100), (10, 30), seed=7), SMALL, BySize())
        means.append(np.mean([one.e2e_s for one in run.served]))
        parts.append(attainment(run.served, Goal(0.1, 0.04)))
    assert means == sorted(means) and parts == sorted(parts, reverse=True) and parts[0] > parts[-1]


def test_figures_say_what_they_are():
    trace = synthetic("poisson", 4, 100, (20, 60), (2, 20), seed=1)
    run = simulate(trace, SMALL, BySize())
    found = {one.name: one for one in figures(run, Goal(1.0, 0.5), warmup=0.2)}
    assert all(one.how == "modelled" for one in found.values())
    assert found["joules_per_token"].value is None and "unknown" in found["joules_per_token"].note
    assert "(output tokens - 1)" in found["tpot_p50_s"].note
    late = [one.ttft_s for one in run.served[20:]]
    assert found["ttft_p90_s"].value == pytest.approx(np.percentile(late, 90)) and found["ttft_p90_s"].n == 80
    assert 0 < found["page_waste"].value < 1 and 0 < found["utilization"].value <= 1
    assert to_csv(run.served).count("\n") == 101


def test_one_token_has_no_time_per_token():
    run = simulate(synthetic("uniform", 1, 3, (5, 5), (1, 1)), SMALL, BySize())
    assert [one.tpot_s for one in run.served] == [None] * 3
    found = {one.name: one.value for one in figures(run, Goal(1, 1))}
    assert found["tpot_p50_s"] is None and found["attainment"] == 1.0


def test_events_of_one_time_happen_in_the_order_they_were_told():
    loop, seen = EventLoop(), []
    for name in "abc":
        loop.at(1.0, lambda name=name: seen.append(name))
    loop.at(0.5, lambda: loop.at(0.1, lambda: seen.append("late")))  # not in the past
    loop.run()
    assert seen == ["late", "a", "b", "c"] and loop.now == 1.0


def test_dynamic_batching_waits_for_its_delay():
    trace = Trace(synthetic("uniform", 0.1, 2, (4, 4), (1, 1)).arrivals[:1])
    run = simulate(
        trace, EngineSizes(60, 16, 8, 64, 512, batching="dynamic", max_delay_s=0.25), FixedSteps(lambda: 0.1)
    )
    assert run.served[0].started_s == pytest.approx(0.25) and run.served[0].last_s == pytest.approx(0.35)
