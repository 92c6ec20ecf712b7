"""The choice of recomputed layers against all choices, by brute force."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.solvers.recomputation import RankLayers, fits, least_recomputation, step_seconds


@st.composite
def problems(draw):
    ranks, first = [], 0
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 3))
        again = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
        sizes = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
        room = draw(st.integers(0, 12))
        names = tuple(range(first, first + count))
        ranks.append(
            RankLayers(names, float(draw(st.integers(1, 20))), tuple(map(float, again)), tuple(map(float, sizes)), room)
        )
        first += count
    return ranks, draw(st.integers(1, 6))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_no_choice_that_fits_is_faster(problem):
    ranks, passes = problem
    layers = [layer for one in ranks for layer in one.layers]
    every = chain.from_iterable(combinations(layers, count) for count in range(len(layers) + 1))
    best = min(step_seconds(ranks, passes, one) for one in every if fits(ranks, one))
    found = least_recomputation(ranks, passes)
    assert found is not None and fits(ranks, found)
    assert step_seconds(ranks, passes, found) == pytest.approx(best, rel=1e-9)


def test_a_rank_with_less_room_recomputes_more_and_a_faster_one_may_for_free():
    """The first rank holds four micro-batches, the last one, with the head, takes longest and keeps all."""
    first = RankLayers((0, 1, 2, 3), 1.0, (0.2,) * 4, (40.0,) * 4, 70.0)
    last = RankLayers((4, 5, 6, 7), 2.0, (0.2,) * 4, (10.0,) * 4, 70.0)
    assert least_recomputation([first, last], 8) == (0, 1, 2)


def test_bytes_as_large_as_a_gpus_are_told_apart():
    """Layers of unlike sizes in bytes: both do not fit by a thousandth of one."""
    sizes = (3.003e9, 3.000e9)
    one = RankLayers((0, 1), 1.0, (0.10, 0.11), sizes, 6.0e9)
    assert least_recomputation([one], 4) == (0,)
    assert least_recomputation([one._replace(room=6.003e9)], 4) == ()


def test_without_room_for_what_is_always_there_nothing_fits():
    assert least_recomputation([RankLayers((0,), 1.0, (1.0,), (1.0,), -1.0)], 2) is None
