"""Disaggregation by its formulas: published thresholds, brute force over time lines."""

from __future__ import annotations

import pytest

from hone.base.errors import SpecError
from hone.plan.simulate.disaggregated import (
    best_split,
    cache_bytes,
    fetch_link,
    prefill_link,
    remote_weights_slowdown,
    tokens_per_fetch,
)
from tests.cost.h200 import LLAMA_8B


def test_h200_over_pcie5_needs_eleven_thousand_tokens_a_fetch():
    assert tokens_per_fetch(2, 720e12, 63e9) == pytest.approx(11_430, rel=0.01)
    assert tokens_per_fetch(2, 720e12, 400e9) == pytest.approx(1_800, rel=0.01)
    assert fetch_link(2, 720e12, 11_430) == pytest.approx(63e9, rel=0.01)


def slowdown_by_layers(tokens: int, layers: int, params: float, width: float, peak: float, link: float) -> float:
    """A pass in which a layer is computed once it is there and the one before is done; fetches follow one another."""
    fetched = computed = 0.0
    for _ in range(layers):
        fetched += width * params / link
        computed = max(computed, fetched) + 2 * tokens * params / peak
    return computed / (layers * 2 * tokens * params / peak)


@pytest.mark.parametrize("tokens", [64, 2_000, 11_000, 12_000, 50_000])
def test_a_time_line_of_many_layers_takes_as_long(tokens):
    found = remote_weights_slowdown(2, 720e12, 63e9, tokens)
    assert found == pytest.approx(slowdown_by_layers(tokens, 2000, 1e8, 2, 720e12, 63e9), rel=0.002)


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
    with pytest.raises(SpecError, match="link_bytes_per_s is 0"):
        tokens_per_fetch(2, 1e12, 0)


def test_a_prompts_cache_travels_beside_its_prefill():
    """Llama-3-8B keeps 131,072 bytes a token; 2,048 tokens in 60 ms need 4.5 GB/s."""
    assert cache_bytes(LLAMA_8B, 2048, 2) == 131_072 * 2048
    assert prefill_link(LLAMA_8B, 2048, 0.060, 2) == pytest.approx(4.47e9, rel=0.01)
