"""Autoscaling policies: pure functions of what was seen, against their published formulas, worked by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from hone.base.errors import SpecError
from hone.serve import AUTOSCALERS
from hone.serve.replicas.autoscale.doubling import Doubling
from hone.serve.replicas.autoscale.hysteresis import Hysteresis
from hone.serve.replicas.autoscale.panic_window import PanicWindow
from hone.serve.replicas.autoscale.policy import Load, Seen
from hone.serve.replicas.autoscale.predictive import Predictive
from hone.serve.replicas.autoscale.target_tracking import TargetTracking


def moments(ongoing, *, replicas=4, every=5.0, arrivals=0):
    """A moment every so many seconds, with a fixed number of replicas."""
    return [Load(every * place, replicas, replicas, each, arrivals) for place, each in enumerate(ongoing)]


def follow(policy, ongoing, *, start=None, every=5.0, arrivals=None):
    """The numbers of replicas when each decision is carried out at once."""
    seen, count, counts = Seen(policy), start or policy.min_replicas, []
    for place, each in enumerate(ongoing):
        came = 0 if arrivals is None else arrivals[place]
        count = seen.decide(Load(every * place, count, count, each, came))
        counts.append(count)
    return counts


def test_doubling_goes_from_4_to_64_and_back():
    policy = Doubling()
    up = follow(policy, [1000] * 100)
    assert sorted(set(up)) == [4, 8, 16, 32, 64] and up == sorted(up) and up[-1] == 64
    down = follow(policy, [0] * 100, start=64)
    assert sorted(set(down)) == [4, 8, 16, 32, 64] and down == sorted(down, reverse=True) and down[-1] == 4
    changes = [place for place in range(1, 100) if up[place] != up[place - 1]]
    assert min(b - a for a, b in itertools.pairwise(changes)) * 5.0 > policy.cool_down_s


def test_doubling_ignores_a_peak_and_does_not_swing():
    policy = Doubling(target=10)
    assert set(follow(policy, [20, 20, 100, 20, 20, 100, 20, 20] * 4)) == {4}  # 0.5 but for moments
    assert set(follow(policy, [34] * 60)) == {4, 8}  # 0.85, then 0.425: neither above .8 nor below .3
    with pytest.raises(SpecError, match="doubled again"):
        Doubling.read({"kind": "doubling", "high": 0.5, "low": 0.4})


def test_target_tracking_is_ray_serves_formula():
    """ceil(n (1 + (ongoing / n / target - 1) factor)), once 30 s have asked for it."""
    policy = TargetTracking(down_delay_s=60.0)
    for ongoing, factor, wanted in ((16, 1.0, 8), (17, 1.0, 9), (24, 0.5, 8), (8, 1.0, 4)):
        policy = TargetTracking(factor=factor, down_delay_s=60.0)
        assert policy.desired(moments([ongoing] * 20)) == wanted
    assert policy.desired(moments([16] * 4)) == 4  # not for 30 s yet
    assert policy.desired(moments([2] * 10)) == 4 and policy.desired(moments([2] * 16)) == 1
    assert policy.desired(moments([2] * 10 + [40] + [2] * 8)) == 4  # one moment's average asked for more meanwhile
    assert TargetTracking().down_delay_s == 600.0 and TargetTracking().target == 2.0


def test_panic_window_follows_a_burst_at_once_and_forgets_it_after_a_minute():
    policy = PanicWindow(target=10, utilization=0.7)
    calm = [14] * 12  # 14 / 7 = 2 replicas
    assert policy.desired(moments(calm, replicas=2)) == 2
    burst = follow(policy, [*calm, 140, 140, *calm, *calm, *calm], start=2)
    assert burst[11] == 2 and burst[12] >= 11 and burst[13] == 20  # the mean of 6 s; then all of it: 140 / 7
    assert min(burst[13:24]) == 20  # it never goes down while it panics
    assert burst[-1] == 2
    assert all(b >= math.floor(a / 2) for a, b in itertools.pairwise(burst))  # by at most a factor of two


def test_predictive_starts_replicas_before_they_are_needed():
    """A rate that grows by 0.02 requests/s each second: in 100 s it is 2 more."""
    policy = Predictive(rate_per_replica=1.0, horizon_s=100.0, bin_s=10.0, level=0.8, trend=0.8, margin=0.0)
    arrivals = [round(5 * (1 + 0.02 * 5 * place)) for place in range(60)]
    seen = [Load(5.0 * place, 3, 3, 0, each) for place, each in enumerate(arrivals)]
    now = arrivals[-1] / 5
    assert policy.forecast(seen) == pytest.approx(now + 2.0, rel=0.08)
    assert policy.desired(seen) == math.ceil(round(policy.forecast(seen), 9))
    steady = moments([0] * 60, arrivals=15)  # 3 a second
    assert policy.forecast(steady) == pytest.approx(3.0) and policy.desired(steady) == 3
    late = [*steady[:-1], Load(steady[-1].time_s, 4, 4, 232, 15)]  # 200 beyond what 4 answer in time: 2 a second more
    assert policy.desired(late) == 5


def test_predictive_waits_before_it_goes_down():
    policy = Predictive(rate_per_replica=1.0, bin_s=10.0, margin=0.0, trend=0.0, down_delay_s=100.0)
    arrivals = [20] * 40 + [0] * 60
    counts = follow(policy, [0] * 100, arrivals=arrivals, start=4)
    assert counts[39] == 4 and counts[45] == 4 and counts[-1] == 1


def test_hysteresis_has_a_band_without_changes():
    policy = Hysteresis(high=8, low=4)
    assert set(follow(policy, [20] * 40, start=4)) == {4}  # 5 each, and 6.7 were there 3
    assert follow(policy, [40] * 60, start=4)[-1] == 5  # 10 each, then 8: not above
    down = follow(policy, [11] * 60, start=6)
    assert down[-1] == 3  # 3.67 each; were there two, 5.5: not below
    with pytest.raises(SpecError, match="no band"):
        Hysteresis.read({"kind": "hysteresis", "high": 2, "low": 2})


@pytest.mark.parametrize("name", [*AUTOSCALERS])
def test_every_policy_keeps_its_range_and_is_pure(name):
    policy = AUTOSCALERS.read({"kind": name, "min_replicas": 2, "max_replicas": 6})
    idle, busy = [0] * 250, [10_000] * 250
    assert follow(policy, idle, start=6, arrivals=[0] * 250)[-1] == 2
    assert follow(policy, busy, start=2, arrivals=[5000] * 250)[-1] == 6
    seen = moments([3, 50, 9, 70] * 10, replicas=3, arrivals=4)
    assert policy.desired(seen) == policy.desired(list(seen)) == policy.desired(tuple(seen))
    assert policy.desired([*seen, Load(300.0, 0, 0, 5)]) == 2  # all have ended
    assert 2 <= policy.desired([*seen, Load(300.0, 0, 0, 5), Load(301.0, 2, 0, 5)]) <= 6
    with pytest.raises(SpecError, match="seen nothing"):
        policy.desired([])
    with pytest.raises(SpecError, match="above max_replicas"):
        AUTOSCALERS.read({"kind": name, "min_replicas": 9, "max_replicas": 6})


def test_old_moments_are_forgotten():
    seen = Seen(Hysteresis())
    for place in range(1000):
        seen.decide(Load(float(place), 1, 1, 0))
    assert len(seen._loads) <= 32
