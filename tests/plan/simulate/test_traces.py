"""Traces: the published files' rows, rates by stretching and thinning, prefixes that Mooncake's requests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hone.base.errors import SpecError
from hone.plan.simulate.replica import EngineSizes
from hone.plan.simulate.run import simulate
from hone.plan.simulate.trace_files import MOONCAKE_BLOCK, read_trace
from hone.plan.simulate.traces import Arrival, Trace, at_rate, synthetic
from tests.plan.simulate.fixed import FixedSteps

DATA = Path(__file__).parent / "data"
BURST_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
120,GPT-4,300,0,300,API log
"""
BURST_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log
"""


def test_azure_rows_are_read():
    trace = read_trace(DATA / "azure_2023_conv_first_1500.csv")
    assert len(trace.arrivals) == 1500
    assert trace.arrivals[0] == Arrival(0.0, 374, 44)
    assert trace.arrivals[1] == Arrival(pytest.approx(4.314579), 396, 109)
    assert 4 < trace.rate < 6 and 1.0 < trace.burstiness < 1.5


def test_the_code_trace_is_bursty():
    """CV 13.15 over all 8,819 rows; its first thousand have gaps that are far from Poisson's, too."""
    trace = read_trace(DATA / "azure_2023_code_first_1000.csv", "azure")
    assert trace.burstiness > 3


def test_burstgpt_rows_are_read_in_both_forms(tmp_path):
    """The columns of files 1 and 2, and of file 3, which has two more in the middle; a failure has no response."""
    for text, wanted in (
        (BURST_1, [(0, 472, 18), (40, 1087, 230), (113, 417, 276)]),
        (BURST_3, [(0, 906, 446), (51, 36, 29)]),
    ):
        (tmp_path / "trace.csv").write_text(text)
        trace = read_trace(tmp_path / "trace.csv")
        assert [(one.time_s, one.prompt_tokens, one.output_tokens) for one in trace.arrivals] == wanted


def test_mooncakes_requests_hit_what_came_before():
    """With room for everything and time enough, hits are the blocks that an earlier prompt begins with: by brute force."""
    trace = read_trace(DATA / "mooncake_conversation_first_300.jsonl")
    assert trace.arrivals[0].prompt_tokens == 6758 and trace.arrivals[0].blocks == tuple(range(14))
    some = Trace(
        tuple(
            Arrival(1e5 * place, one.prompt_tokens, 1, one.blocks, one.block_tokens)
            for place, one in enumerate(trace.arrivals[:120])
        )
    )
    sizes = EngineSizes(120_000, 64, 1, 200_000, 200_000)
    run = simulate(some, sizes, FixedSteps(lambda: 1.0))
    seen: set[tuple[int, ...]] = set()
    for arrival, served in zip(some.arrivals, run.served, strict=True):
        whole = arrival.prompt_tokens // MOONCAKE_BLOCK
        known = max((count for count in range(whole + 1) if count == 0 or arrival.blocks[:count] in seen), default=0)
        least = min(known * MOONCAKE_BLOCK, (arrival.prompt_tokens - 1) // 64 * 64)
        assert least <= served.cached_tokens <= least + MOONCAKE_BLOCK  # a cut last block may share a few more pages
        seen |= {arrival.blocks[:count] for count in range(1, whole + 1)}
    assert sum(one.cached_tokens for one in run.served) > 60_000


def test_stretching_keeps_bursts_and_thinning_keeps_gaps_real():
    trace = read_trace(DATA / "azure_2023_code_first_1000.csv")
    fast = at_rate(trace, 2 * trace.rate)
    assert fast.rate == pytest.approx(2 * trace.rate) and fast.burstiness == pytest.approx(trace.burstiness)
    assert [one.prompt_tokens for one in fast.arrivals] == [one.prompt_tokens for one in trace.arrivals]
    few = at_rate(trace, trace.rate / 4, "thin", seed=3)
    assert few.rate == pytest.approx(trace.rate / 4, rel=0.2)
    assert {one.time_s for one in few.arrivals} <= {one.time_s for one in trace.arrivals}
    assert few == at_rate(trace, trace.rate / 4, "thin", seed=3)
    with pytest.raises(SpecError, match="thinning leaves at most"):
        trace.thinned(10 * trace.rate)


@pytest.mark.parametrize(
    ("process", "cv", "wanted"), [("poisson", 1, 1), ("gamma", 4, 4), ("gamma", 0.5, 0.5), ("uniform", 1, 0)]
)
def test_drawn_arrivals_have_their_rate_and_burstiness(process, cv, wanted):
    trace = synthetic(process, 3.0, 30_000, (10, 20), (5, 5), cv=cv, seed=1)
    assert trace.rate == pytest.approx(3.0, rel=0.06) and trace.burstiness == pytest.approx(wanted, rel=0.06, abs=1e-6)
    assert {one.output_tokens for one in trace.arrivals} == {5}
    assert np.mean([one.prompt_tokens for one in trace.arrivals]) == pytest.approx(15, rel=0.02)
    other = synthetic(process, 6.0, 30_000, (10, 20), (5, 5), cv=cv, seed=1)
    assert other.arrivals[-1].time_s == pytest.approx(trace.arrivals[-1].time_s / 2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a,b\n1,2\n", "no known trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,x,4\n", "after line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ('{"timestamp": 0, "input_length": 5}\n', "output_length"),
    ],
)
def test_a_wrong_file_is_said(tmp_path, text, what):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(SpecError, match=what):
        read_trace(tmp_path / "trace")


def test_a_missing_file_and_an_impossible_rate_are_said(tmp_path):
    with pytest.raises(SpecError, match="no trace file"):
        read_trace(tmp_path / "none")
    with pytest.raises(SpecError, match="impossible"):
        synthetic("poisson", 0.0, 10, (1, 1), (1, 1))
    with pytest.raises(SpecError, match="one time"):
        Trace((Arrival(0, 1, 1), Arrival(0, 1, 1))).stretched(1.0)
