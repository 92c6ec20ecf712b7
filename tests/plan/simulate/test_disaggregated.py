"""Prefill and decode apart: a time line by hand, nothing lost, and the best split against all of them."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.plan.simulate.disaggregated import Disaggregation, best_split
from hone.plan.simulate.figures import Goal, figures, littles_gap
from hone.plan.simulate.replica import EngineSizes
from hone.plan.simulate.run import Conduct, simulate
from hone.plan.simulate.spec import SimulationSpec
from hone.plan.simulate.traces import Arrival, Trace, synthetic

SIZES = EngineSizes(80, 16, 4, 64, 512)


class Linear:
    """A step takes 10 ms for each token of a prompt and 20 ms to decode."""

    def step_s(self, kind, *, again=False):
        return 0.01 * sum(count for _, count in kind.chunks) + (0.02 if kind.decoding else 0.0)


def apart(prefill: int = 1, decode: int = 1, link: float = 100.0) -> Conduct:
    return Conduct(apart=Disaggregation(prefill, decode, link, lambda tokens: 10.0 * tokens, 5))


def test_two_prompts_by_hand():
    """Prompts of 20 and 10 tokens: 200 and 100 bytes over 100 bytes/s, so 2 s and 1 s; 5 layers of 0.4 s and 0.2 s."""
    trace = Trace((Arrival(0.0, 20, 3), Arrival(0.2, 10, 3)))
    run = simulate(trace, SIZES, Linear(), apart())
    first, second = run.served
    assert (first.first_s, second.first_s) == pytest.approx((0.2, 0.3))
    # The first leaves from 0 to 2 s, the second is behind it: from 2 to 3 s.
    assert run.apart.transfers_s == pytest.approx([1.8, 2.7])
    assert (first.last_s, second.last_s) == pytest.approx((2.0 + 2 * 0.02, 3.0 + 2 * 0.02))
    assert run.apart.sent_bytes == 300 and run.apart.most_bytes == 300
    # A link that is not the limit: the last layer still comes after the prefill's end.
    fast = simulate(trace, SIZES, Linear(), apart(link=1e4))
    assert fast.apart.transfers_s == pytest.approx([200 / 5 / 1e4, 100 / 5 / 1e4])


def test_no_request_is_lost_and_no_prompt_is_computed_twice():
    trace = synthetic("poisson", 3.0, 120, (5, 60), (1, 20), seed=3)
    run = simulate(trace, SIZES, Linear(), apart(2, 3, 1e4))
    assert run.unfinished == 0 and littles_gap(run) < 1e-9
    assert all(one.done == one.output_tokens for one in run.served)
    sides = run.apart.prefill.members, run.apart.decode.members
    prompts, decoded = (sum(one.replica.counts.tokens for one in side) for side in sides)
    assert prompts == sum(one.prompt_tokens for one in trace.arrivals)
    assert not sum(one.preemptions for one in run.served)
    assert decoded == sum(one.output_tokens - 1 for one in trace.arrivals)
    again = simulate(trace, SIZES, Linear(), apart(2, 3, 1e4))
    assert [one.last_s for one in again.served] == [one.last_s for one in run.served]


def test_few_pages_preempt_and_the_sequence_is_computed_again():
    """Two sequences of 60 tokens in the end do not fit in 6 pages of 16: one of them is computed again where it decodes."""
    trace = Trace((Arrival(0.0, 20, 40), Arrival(0.0, 20, 40)))
    few = EngineSizes(6, 16, 4, 64, 512, enable_prefix_caching=False)
    run = simulate(trace, few, Linear(), apart(link=1e6))
    assert run.unfinished == 0 and sum(one.preemptions for one in run.served) > 0
    assert run.apart.decode.members[0].replica.counts.tokens > 2 * 39


def test_decoding_no_longer_waits_for_prompts():
    """One replica that does both holds tokens up for prompts of 64 tokens; apart a token takes what decoding takes."""
    trace = Trace(tuple(Arrival(0.62 * number, 60, 60) for number in range(40)))
    together, alone = (
        simulate(trace, SIZES, Linear(), Conduct(replicas=2)),
        simulate(trace, SIZES, Linear(), apart(1, 1, 1e9)),
    )
    tpot = [{one.name: one.value for one in figures(run, Goal(9, 9))}["tpot_p90_s"] for run in (together, alone)]
    assert tpot[0] > 0.03 and tpot[1] == pytest.approx(0.02, rel=0.1)
    found = {one.name: one.value for one in alone.apart.figures(alone.end_s, bound=False)}
    assert found["prefill_utilization"] > 0.9 and found["decode_utilization"] > 0.9


def test_the_best_split_is_the_best_of_all():
    for machines, prefill, decode, link in (
        (8, 4.0, 1.0, 9e9),
        (64, 10.0, 3.0, 6.0),
        (2, 1.0, 9.0, 1.0),
        (16, 1.0, 1.0, 0.5),
    ):
        best = best_split(machines, prefill, decode, link)
        rates = [min(x * min(prefill, link), (machines - x) * decode) for x in range(1, machines)]
        assert best.rate(link) == max(rates) and best.prefill + best.decode == machines
    with pytest.raises(SpecError, match="cannot be divided"):
        best_split(1, 1.0, 1.0)
    with pytest.raises(SpecError, match="link_rate is 0"):
        best_split(2, 1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"elastic.autoscaler": "hysteresis"}, "do not go together"),
        ({"replicas": "2"}, "leave replicas out"),
        ({"disaggregation.decode_replicas": "0"}, "decode_replicas"),
    ],
)
def test_what_does_not_go_together_is_refused(more, match):
    with pytest.raises(SpecError, match=match):
        SimulationSpec.from_overrides({"traffic.rate": "1", "disaggregation.prefill_replicas": "2", **more})
