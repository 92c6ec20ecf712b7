"""Fleets that grow and shrink: nothing is lost, cold starts and warm pools cost what they should, policies differ as they must."""

from __future__ import annotations

import pytest

from hone.plan.simulate.elastic import Elasticity, Scaling
from hone.plan.simulate.events import EventLoop
from hone.plan.simulate.figures import Goal, attainment, littles_gap
from hone.plan.simulate.fleet import Fleet
from hone.plan.simulate.replica import EngineSizes, Served
from hone.plan.simulate.run import Conduct, simulate
from hone.plan.simulate.traces import Arrival, Trace, synthetic
from hone.serve import AUTOSCALERS
from hone.serve.replicas.autoscale.hysteresis import Hysteresis

SIZES = EngineSizes(60, 16, 4, 64, 512)


class Slow:
    """A replica of these serves about 2 requests/s of 10 tokens."""

    def step_s(self, kind, *, again=False):
        return 0.05 * (1 + kind.decoding)


def peak(calm: float = 0.5, busy: float = 5.0, seed: int = 0) -> Trace:
    """Calm, then a peak, then calm again, 200 s each."""
    arrivals: list[Arrival] = []
    for part, rate in enumerate((calm, busy, calm)):
        some = synthetic("poisson", rate, int(200 * rate), (5, 20), (10, 10), seed=seed + part).arrivals
        arrivals += [
            Arrival(200.0 * part + min(one.time_s, 199.0), one.prompt_tokens, one.output_tokens) for one in some
        ]
    return Trace(tuple(arrivals))


def serve(policy, *, replicas=1, trace=None, **options):
    scaling = Scaling(Elasticity(policy, **{"start_s": 20.0, **options}))
    conduct = Conduct(scaling.begin, came=scaling.came, replicas=replicas, most=max(scaling.most, replicas))
    run = simulate(trace or peak(), SIZES, Slow(), conduct)
    found = {one.name: one.value for one in scaling.figures(run.fleet, run.end_s)}
    assert run.unfinished == 0 and littles_gap(run) < 1e-9
    return run, found, scaling


@pytest.mark.parametrize("name", [*AUTOSCALERS])
def test_every_policy_meets_a_peak_that_one_replica_does_not(name):
    fields = {"kind": name, "min_replicas": 1, "max_replicas": 6}
    fields |= {"rate_per_replica": 1.5, "horizon_s": 20.0, "in_time": 4} if name == "predictive" else {}
    fields |= {"target": 4} if name in ("doubling", "panic_window") else {}
    fields |= {"down_delay_s": 60.0} if name == "target_tracking" else {}
    run, found, scaling = serve(AUTOSCALERS.read(fields))
    goal = Goal(10.0, 1.0)
    alone = simulate(peak(), SIZES, Slow())
    most = simulate(peak(), SIZES, Slow(), Conduct(replicas=6))
    assert attainment(run.served, goal) > attainment(alone.served, goal) + 0.2
    assert found["replica_hours"] < sum(one.alive_s(most.end_s) for one in most.fleet.members) / 3600
    assert 1 < found["most_replicas"] <= 6 and found["replicas_started"] >= 2 and found["replicas_drained"] >= 1
    again, _, _ = serve(AUTOSCALERS.read(fields))
    assert [one.last_s for one in again.served] == [one.last_s for one in run.served]
    assert len(scaling.moments) > 100


def test_a_warm_pool_answers_sooner_and_costs_its_hours():
    policy = Hysteresis(max_replicas=6)
    cold, cold_found, _ = serve(policy, start_s=60.0)
    warm, warm_found, _ = serve(policy, start_s=60.0, warm=2, warm_start_s=1.0)
    goal = Goal(5.0, 1.0)
    assert attainment(warm.served, goal) > attainment(cold.served, goal)
    assert warm_found["replica_hours"] > 2 * warm.end_s / 3600
    assert cold_found["replica_hours"] == pytest.approx(
        sum(one.alive_s(cold.end_s) for one in cold.fleet.members) / 3600
    )


def test_longer_cold_starts_meet_fewer_goals():
    parts = [
        attainment(serve(Hysteresis(max_replicas=6), start_s=start)[0].served, Goal(5.0, 1.0))
        for start in (0.0, 30.0, 120.0)
    ]
    assert parts == sorted(parts, reverse=True) and parts[0] > parts[-1]


def fleet_with(count: int, requests: int):
    """A fleet in which every replica has requests, at the time 1 s."""
    loop, done = EventLoop(), []
    fleet = Fleet(loop, SIZES, Slow(), lambda one, now: done.append(one) if one.last_s else None, most=count + 1)
    for _ in range(count):
        fleet.start()
    served = [Served(number, 0.0, 8, 12) for number in range(requests)]
    for one in served:
        fleet.submit(one, [one.number] * 8)
    return loop, fleet, served, done


@pytest.mark.parametrize("migration", ["none", "waiting", "all"])
def test_a_draining_replica_loses_nothing_and_stops_when_empty(migration):
    loop, fleet, served, done = fleet_with(2, 20)
    leaving = fleet.members[0]
    loop.at(0.5, lambda: fleet.drain(leaving, migration))
    loop.run()
    assert sorted(one.number for one in done) == list(range(20)) and all(one.done == 12 for one in served)
    assert leaving.state == "stopped" and fleet.of("ready") == [fleet.members[1]]
    stayed = sum(one.replica == 0 for one in served)
    if migration == "all":
        assert stayed == 0 and leaving.ended_s == 0.5
    else:
        assert stayed == (10 if migration == "none" else 4)  # max_num_seqs of them had begun


def test_a_killed_replicas_requests_go_on_elsewhere_from_the_token_they_had():
    loop, fleet, served, done = fleet_with(2, 8)
    loop.at(1.3, lambda: fleet.kill(fleet.members[0]))
    loop.run()
    assert len(done) == 8 and {one.replica for one in served} == {1}
    assert fleet.members[0].ended_s == 1.3
    counts = [one.replica.counts for one in fleet.members]
    assert (
        sum(one.output_tokens for one in counts) <= 8 * 12 + 4
    )  # the step under way was lost, nothing else is sampled twice


def test_a_new_replica_takes_what_it_can_run_of_what_waits():
    """Of 14 requests at one replica 4 run and 10 wait: when a second is ready it takes the 4 newest, as the server does."""
    loop, done = EventLoop(), []
    fleet = Fleet(loop, SIZES, Slow(), lambda one, now: done.append(one) if one.last_s else None, most=2)
    fleet.start()
    served = [Served(number, 0.0, 8, 100) for number in range(14)]
    for one in served:
        fleet.submit(one, [one.number] * 8)
    loop.at(0.5, lambda: fleet.start())
    loop.run()
    assert len(done) == 14 and all(one.done == 100 for one in served)
    assert [one.number for one in served if one.replica == 1] == [10, 11, 12, 13]


def test_requests_wait_while_no_replica_is_ready():
    loop, done = EventLoop(), []
    fleet = Fleet(loop, SIZES, Slow(), lambda one, now: done.append(one) if one.last_s else None, most=2)
    fleet.start(30.0)
    fleet.submit(Served(0, 0.0, 8, 1), [0] * 8)
    assert fleet.outstanding == 1
    loop.run()
    assert done[0].started_s == 30.0


def test_a_starting_replica_is_given_up_before_one_that_works():
    loop, fleet, _, _ = fleet_with(1, 2)
    new = fleet.start(60.0)
    ordered = Scaling._least_useful(fleet.of("ready", "starting"))
    assert ordered[0] is new
    fleet.drain(new)
    assert new.state == "stopped"
    loop.run()
    assert fleet.of("ready") == [fleet.members[0]]
