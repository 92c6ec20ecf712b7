"""Weights of the mixtures that look at sizes only: sums, caps, the papers' cases, and what cannot be."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hone.base.errors import SpecError
from hone.feed import MIXTURES
from hone.feed.mix.base import Chosen, Source
from hone.feed.mix.simplex import fill

SIZES = st.lists(st.integers(2, 10**9), min_size=1, max_size=12)


def sources(sizes: list[int]) -> list[Source]:
    return [Source(f"s{number}", size) for number, size in enumerate(sizes)]


def weights(kind: str, sizes: list[int], budget: float, **options) -> np.ndarray:
    chosen = MIXTURES.read({"kind": kind, **options}).weigh(sources(sizes), budget)
    assert [share.source for share in chosen.shares] == [f"s{number}" for number in range(len(sizes))]
    return np.array([share.weight for share in chosen.shares])


@settings(max_examples=150)
@given(SIZES, st.floats(0.01, 1), st.floats(0.2, 20), st.sampled_from(["proportional", "temperature", "unimax"]))
@example([2, 2, 2, 2, 999_999_992, 1_000_000_000], 0.5, 1, "proportional")
def test_weights_sum_to_one_and_keep_every_cap(sizes, part, max_epochs, kind):
    budget = part * max_epochs * sum(sizes)
    chosen = MIXTURES.read({"kind": kind, "max_epochs": max_epochs}).weigh(sources(sizes), budget)
    found = np.array([share.weight for share in chosen.shares])
    assert found.sum() == pytest.approx(1, abs=1e-9) and (found > 0).all()
    for share in chosen.shares:
        assert share.epochs == pytest.approx(share.weight * budget / share.tokens)
        assert share.epochs <= max_epochs * (1 + 1e-6)
        if share.capped:
            assert share.epochs == pytest.approx(max_epochs, rel=1e-4) and "reduced to the cap" in share.reason
        assert share.reason
    assert Chosen.read(json.loads(json.dumps(chosen.row()))) == chosen


def unimax_by_the_paper(sizes: list[int], budget: float, epochs: float) -> np.ndarray:
    """Algorithm 1 of arXiv:2304.09151, word for word."""
    left, out = budget, np.zeros(len(sizes))
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for done, index in enumerate(order):
        share = left / (len(sizes) - done)
        out[index] = sizes[index] * epochs if share > sizes[index] * epochs else share
        left -= out[index]
    return out / out.sum()


@settings(max_examples=100)
@given(SIZES, st.floats(0.01, 1), st.floats(0.2, 20))
def test_unimax_is_the_papers(sizes, part, epochs):
    budget = part * epochs * sum(sizes)
    expected = unimax_by_the_paper(sizes, budget, epochs)
    np.testing.assert_allclose(weights("unimax", sizes, budget, max_epochs=epochs), expected, rtol=1e-6, atol=1e-12)


def test_unimax_by_hand():
    # 100 tokens over 10, 30, 1000 at one epoch: 10 is all there is; 90 / 2 = 45 > 30; the rest is 60.
    np.testing.assert_allclose(weights("unimax", [1000, 10, 30], 100, max_epochs=1), [0.6, 0.1, 0.3])


def test_temperature_goes_from_sizes_to_uniform():
    sizes = [10, 1000, 100_000]
    np.testing.assert_allclose(weights("temperature", sizes, 100, temperature=1), np.array(sizes) / sum(sizes))
    np.testing.assert_allclose(weights("temperature", sizes, 9, temperature=1e9), [1 / 3] * 3, rtol=1e-6)
    flattened = np.array(sizes) ** 0.5
    np.testing.assert_allclose(weights("temperature", sizes, 9, temperature=2), flattened / flattened.sum())
    assert np.isfinite(weights("temperature", sizes, 9, temperature=1e-3)).all()


def test_a_cap_moves_what_it_takes_to_the_others_in_their_proportion():
    found = weights("temperature", [10, 100, 400], 100, temperature=1e9, max_epochs=1)
    np.testing.assert_allclose(found, [0.1, 0.45, 0.45], rtol=1e-6)


def test_fixed_weights_are_kept_or_refused():
    np.testing.assert_allclose(weights("fixed", [10, 10], 10, weights={"s1": 3, "s0": 1}), [0.25, 0.75])
    np.testing.assert_allclose(weights("fixed", [10, 10], 10, weights={"s1": 2, "s0": 0}), [0, 1])
    with pytest.raises(SpecError, match=r"gives 's1' 0.75 of 100 positions, 7.5 epochs"):
        weights("fixed", [50, 10], 100, weights={"s1": 3, "s0": 1})
    with pytest.raises(SpecError, match=r"limits s1 to 40\.0%"):
        weights("fixed", [50, 10], 100, weights={"s1": 3, "s0": 0})
    with pytest.raises(SpecError, match="does not name s1 and names other"):
        weights("fixed", [50, 10], 10, weights={"s0": 3, "other": 1})
    for bad in ({"s0": -1.0, "s1": 2.0}, {"s0": 0.0}, {"s0": float("nan")}, {"s0": float("inf")}):
        with pytest.raises(SpecError, match="weights are numbers"):
            MIXTURES.read({"kind": "fixed", "weights": bad})


@pytest.mark.parametrize("kind", ["proportional", "temperature", "unimax"])
def test_impossible_caps_say_what_would_do(kind):
    with pytest.raises(SpecError, match=r"allows 440 positions, but the training takes 1000") as caught:
        weights(kind, [10, 100], 1000)
    assert "at least 9.1," in str(caught.value)
    assert weights(kind, [10, 100], 1000, max_epochs=9.1).sum() == pytest.approx(1)


def test_impossible_sources_are_named():
    proportional = MIXTURES.read("proportional")
    with pytest.raises(SpecError, match="at least one source"):
        proportional.weigh([], 10)
    with pytest.raises(SpecError, match="two sources have the same name"):
        proportional.weigh([Source("a", 5), Source("a", 5)], 10)
    with pytest.raises(SpecError, match="'b' has 1 tokens"):
        proportional.weigh([Source("a", 5), Source("b", 1)], 10)


def test_estimates_are_the_epochs():
    chosen = MIXTURES.read("proportional").weigh(sources([10, 30]), 80)
    estimates = MIXTURES.read("proportional").estimates(chosen.shares)
    assert {name: estimate.value for name, estimate in estimates.items()} == pytest.approx(
        {"epochs_s0": 2.0, "epochs_s1": 2.0}
    )


def test_filling_keeps_proportions_where_no_cap_binds():
    np.testing.assert_allclose(fill(np.array([1.0, 1, 2]), np.array([1.0, 1, 1])), [0.25, 0.25, 0.5])
    np.testing.assert_allclose(fill(np.array([1.0, 1, 2]), np.array([1.0, 1, 0.2])), [0.4, 0.4, 0.2])
    np.testing.assert_allclose(fill(np.array([1.0, 0, 2]), np.array([0.5, 1, 0.5])), [0.5, 0, 0.5])
