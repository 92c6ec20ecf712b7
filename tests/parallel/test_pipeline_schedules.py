"""Pipeline schedules: each is a valid table, with the bubble and the memory that its paper states."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import pipelines_page
from hone.base.errors import SpecError
from hone.cost.pipeline.check import alive_versions, staleness, validate
from hone.cost.pipeline.simulate import Costs, seconds_of_many, simulate
from hone.cost.pipeline.simulate import peaks as before_and_after
from hone.cost.pipeline.table import Op, Table
from hone.parallel.pipeline import draw
from hone.parallel.pipeline.schedules import SCHEDULES
from hone.parallel.place import stages_of
from hone.report import bars

ANY = ["naive", "gpipe", "1f1b", "breadth_first", "zb_h1", "zb_h2", "zb_v", "pipedream", "pipedream_vertical"]
"""Those for any number of ranks and microbatches."""

ranks = st.integers(1, 7)
seconds = st.floats(0.2, 3)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(ANY), p=ranks, n=st.integers(1, 20))
def test_any_number_of_ranks_and_microbatches(name: str, p: int, n: int):
    table = SCHEDULES[name](p, n)
    validate(table, activations=_cap(name, p, n), versions=p if table.steps else 1)


@settings(max_examples=60, deadline=None)
@given(p=ranks, v=st.integers(1, 4), row=st.integers(0, 5), rest=st.integers(0, 17))
def test_interleaved(p: int, v: int, row: int, rest: int):
    n, row = p + row + rest, p + row
    longest = row + n % row  # what is left after the last full row joins it
    cap = 2 * (p - 1) + (v - 1) * longest + 1
    validate(SCHEDULES["interleaved"](p, n, stages_per_rank=v, contiguous=row), activations=cap, versions=1)
    validate(SCHEDULES["breadth_first"](p, n, stages_per_rank=v), activations=v * n, versions=1)


@settings(max_examples=30, deadline=None)
@given(p=ranks, more=st.integers(0, 3), updates=st.integers(1, 4))
def test_two_buffered_versions_are_enough(p: int, more: int, updates: int):
    each = p + more
    table = SCHEDULES["pipedream_2bw"](p, each * updates, accumulation=each)
    validate(table, activations=p, versions=2)
    assert staleness(table) <= 1 and table.steps == updates


@settings(max_examples=30, deadline=None)
@given(half=st.integers(1, 4), more=st.integers(0, 9))
def test_both_ways(half: int, more: int):
    p = 2 * half
    validate(SCHEDULES["dualpipe"](p, 2 * p + 2 * more), activations=p + 1)
    validate(SCHEDULES["dualpipe_v"](half, 2 * half + more), activations=2 * half + 1)


@settings(max_examples=30, deadline=None)
@given(p=st.integers(2, 6), n=st.integers(2, 14), f=seconds, i=seconds, w=seconds, transfer=st.floats(0, 0.5))
def test_zero_bubble_with_measured_seconds(p: int, n: int, f: float, i: float, w: float, transfer: float):
    costs = Costs(f, i, w, transfer)
    for name in ("zb_h1", "zb_h2"):
        table = SCHEDULES[name](p, n, costs=costs)
        validate(table, activations=_cap(name, p, n))
        assert simulate(table, costs).seconds <= simulate(SCHEDULES["1f1b"](p, n), costs).seconds + 1e-6


def _cap(name: str, p: int, n: int) -> int:
    caps = {"naive": 1, "gpipe": n, "breadth_first": 2 * n, "zb_h2": 2 * p - 1, "zb_v": 2 * p}
    return caps.get(name, p)


@pytest.mark.parametrize("p, n", [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_published_bubbles(p: int, n: int):
    def bubble(name: str, costs: Costs | None = None, **options: int) -> float:
        return simulate(SCHEDULES[name](p, n, **options), costs).bubble

    costs = Costs(1.1, 1.3, 0.7)
    for given_ in (None, costs):
        assert bubble("naive", given_) == pytest.approx(1 - 1 / p)
        assert bubble("gpipe", given_) == pytest.approx((p - 1) / (n + p - 1))
        assert bubble("1f1b", given_) == pytest.approx((p - 1) / (n + p - 1))
        for v in (2, 3, 4):
            wanted = (p - 1) / (v * n + p - 1)
            assert bubble("interleaved", given_, stages_per_rank=v) == pytest.approx(wanted)
            assert bubble("breadth_first", given_, stages_per_rank=v) == pytest.approx(wanted)
    assert bubble("zb_h1") == pytest.approx((p - 1) / (3 * n + p - 1))
    for name in ("zb_h2", "zb_v"):
        assert max(simulate(SCHEDULES[name](p, n)).idle) == pytest.approx(0)
    for name, half in (("dualpipe", p // 2), ("dualpipe_v", p)):
        for f, i, w in ((1, 1, 1), (1.2, 1, 1), (1, 1.0, 0.7)):
            table, work = SCHEDULES[name](p, 4 * p), 4 * p * (f + i + w) * (1 if name == "dualpipe" else 2)
            idle = simulate(table, Costs(f, i, w)).seconds - work
            assert idle == pytest.approx((half - 1) * (f + i - w)), name
            # As published: a forward and a backward of a pair are one pass.
            idle = pipelines_page.in_pairs(table, Costs(f, i, w)) - work
            published = (half - 1) * ((f + i + w) + (i + w) - 3 * w)
            assert idle == pytest.approx(published, abs=1e-9) if i >= f else idle >= published - 1e-9, name


@pytest.mark.parametrize("p, n", [(2, 8), (4, 16), (6, 12), (8, 64)])
def test_the_page_of_pipelines_has_formulas_that_hold(p: int, n: int):
    for name, formula in pipelines_page.PUBLISHED.items():
        for costs in (Costs(), *([] if formula.equal else [pipelines_page.UNEQUAL])):
            published, simulated = pipelines_page.idle(name, p, n, costs)
            assert simulated == pytest.approx(max(published, 0), abs=1e-9), name
        published, simulated = pipelines_page.held(name, p, n)
        assert simulated == min(published, n), name


@pytest.mark.parametrize("p, n", [(2, 4), (4, 8), (8, 32)])
def test_published_memory(p: int, n: int):
    def peaks(name: str, **options: int) -> tuple[float, ...]:
        return simulate(SCHEDULES[name](p, n, **options)).peaks

    assert peaks("gpipe") == (n,) * p
    assert before_and_after(SCHEDULES["gpipe"](p, n), 0, [1.0] * p) == (n, n - 1), (
        "gradients come when all forwards are over"
    )
    assert before_and_after(SCHEDULES["1f1b"](p, n), 0, [1.0] * p) == (p, p if n > p else p - 1)
    assert peaks("1f1b") == tuple(p - rank for rank in range(p))
    assert max(peaks("interleaved", stages_per_rank=3)) == 2 * (p - 1) + 2 * p + 1
    assert max(peaks("zb_h1")) == p
    assert max(peaks("zb_h2")) == min(n, 2 * p - 1)
    assert set(peaks("zb_v")) == {2 * p}
    assert max(peaks("dualpipe")) == p + 1
    assert max(peaks("dualpipe_v")) == 2 * p + 1


def test_versions():
    for p in (2, 4):
        assert alive_versions(SCHEDULES["pipedream"](p, 8)) == [p - rank for rank in range(p)]
        assert staleness(SCHEDULES["pipedream"](p, 8)) == p - 1
        assert max(alive_versions(SCHEDULES["pipedream_vertical"](p, 8))) <= p
        buffered = SCHEDULES["pipedream_2bw"](p, 8 * p)
        validate(buffered, versions=2)
        assert max(alive_versions(buffered)) == 2
        assert staleness(buffered) == 1


def test_a_wrong_table_is_refused():
    right = SCHEDULES["1f1b"](2, 3)
    first, second = right.ranks

    def refused(because: str, table: Table, **limits: int) -> None:
        with pytest.raises(SpecError, match=because):
            validate(table, **limits)

    refused(
        "stops: rank 0 at B of stage 0 of microbatch 0; rank 1 at B of stage 1",
        replace(right, ranks=(first, second[1:] + second[:1])),
    )
    refused("I of stage 1 of microbatch 2 is there 0 times", replace(right, ranks=(first, second[:-1])))
    refused("F of stage 0 of microbatch 0 is there 2 times", replace(right, ranks=((*first, Op("F", 0, 0)), second)))
    refused(
        "F of stage 1 of microbatch 0 is on rank 0 instead of 1",
        replace(right, ranks=((*first, Op("F", 1, 0)), second)),
    )
    refused("belongs to no stage", replace(right, microbatches=2))
    refused("rank 0 holds 2 activations, 1 are allowed", right, activations=1)
    stale = SCHEDULES["pipedream"](2, 3)
    refused("rank 0 holds 2 versions of weights, 1 are allowed", stale, versions=1)
    early = tuple(op._replace(version=1) if op.kind == "F" else op for op in first)
    refused("reads weights that are not made yet", replace(right, ranks=(early, second)))
    other = tuple(op._replace(version=0) if op.kind == "B" else op for op in stale.ranks[1])
    refused("reads other weights than its forward", replace(stale, ranks=(stale.ranks[0], other)))
    for name, p, n in (
        ("interleaved", 4, 3),
        ("dualpipe", 3, 8),
        ("dualpipe", 4, 6),
        ("dualpipe_v", 2, 3),
        ("pipedream_2bw", 2, 3),
    ):
        with pytest.raises(SpecError, match=f"{n} microbatches"):
            SCHEDULES[name](p, n)


def test_transfers_and_uneven_stages_take_time():
    table = SCHEDULES["gpipe"](2, 2)
    assert simulate(table, Costs(1, 1, 1, transfer=0.5)).seconds == 10
    assert simulate(table, Costs((1, 2), (1, 2), (1, 2))).seconds == 1 + 2 * 6 + 2


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([name for name in sorted(SCHEDULES) if not SCHEDULES[name](2, 4).steps]),
    half=st.integers(1, 3),
    more=st.integers(0, 6),
    data=st.data(),
)
def test_many_costs_at_once(name: str, half: int, more: int, data: st.DataObject):
    """To the bit: both take the same sums and maxima in the same order."""
    p = 2 * half if name == "dualpipe" else half + 1
    table = SCHEDULES[name](p, 2 * (p + more))
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    each = {kind: draw.uniform(0.1, 2, (table.stages, 3)) for kind in "FIW"}
    found = seconds_of_many(table, each, 0.1)
    for number in range(3):
        costs = Costs(*(tuple(each[kind][:, number].tolist()) for kind in "FIW"), transfer=0.1)
        assert simulate(table, costs).seconds == found[number]


def test_drawing():
    played = simulate(SCHEDULES["1f1b"](2, 2))
    assert draw.text(played).splitlines() == ["  0 F0 F1 ······B0    ···B1    ", "  1 ···F0 B0    F1 B1    ······"]
    picture = bars.passes(draw.rows(played), "1F1B", 720)
    assert picture.count("<title>") == 8 and " far" not in picture
    assert all(words in picture for words in ("F forward", "B backward", "empty: waiting")) and "W " not in picture
    assert draw.legend(played) == "F forward, B backward; then the micro-batch; · waiting"
    folded = simulate(SCHEDULES["zb_v"](2, 2))
    first = draw.text(folded).splitlines()[0]
    assert first.startswith("  0 F0 F1 ") and "f0 i0 w0" in first and "W1" in first
    picture_v = bars.passes(draw.rows(folded), "ZB-V", 720)
    assert picture_v.count(" far") == 2 * 2 * 3 + 1, "the passes of second stages and the legend"
    assert "W gradients of weights" in picture_v and "lighter: of the rank&#39;s second stage" in picture_v
    assert "small letters: the rank's second stage" in draw.legend(folded)
    steps = simulate(SCHEDULES["pipedream"](2, 4), Costs(step=1.0))
    assert "S optimizer's step; then the micro-batch, of S the version" in draw.legend(steps)
    narrow = bars.passes(draw.rows(folded), "ZB-V", 300)
    height = lambda drawn: int(drawn.partition('height="')[2].partition('"')[0])  # noqa: E731
    assert height(narrow) > height(picture_v), "a legend that is too wide goes on in the next line"
    assert "<title>B of stage 1 of microbatch 1</title>" in picture


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    stages=st.integers(1, 4),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_stages_are_the_best_of_all(costs: list[int], stages: int, ends: tuple[int, int]):
    if stages > len(costs):
        with pytest.raises(SpecError, match="pipeline stages"):
            stages_of(costs, stages, (0, 0), set())
        return

    def worst(bounds: tuple[int, ...]) -> int:
        each = [sum(costs[begin:end]) for begin, end in zip((0, *bounds), (*bounds, len(costs)), strict=True)]
        each[0] += ends[0]
        each[-1] += ends[1]
        return max(each)

    found = stages_of(costs, stages, ends, set())
    assert [layer for part in found for layer in part] == list(range(len(costs)))
    assert all(found)
    best = min(worst(bounds) for bounds in combinations(range(1, len(costs)), stages - 1))
    assert worst(tuple(part.stop for part in found[:-1])) == best
