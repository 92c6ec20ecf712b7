"""Scaling laws: published optima, the size with serving counted in, and the spread of fits."""

from __future__ import annotations

import pytest

from hone.base.errors import FitError, SpecError
from hone.cost.scaling.laws import LAWS
from hone.cost.scaling.sizes import Size


@pytest.mark.parametrize(
    ("law", "parameters", "tokens", "change"),
    [("sardana", 6.97, 1.25, -0.174), ("hoffmann", 8.02, 1.75, -0.101), ("hoffmann_source", 7.13, 1.30, -0.163), ("besiroglu", 6.10, 0.74, -0.290)],
)  # fmt: skip
def test_a_13b_model_that_serves_2t_tokens(law: str, parameters: float, tokens: float, change: float):
    """Sardana et al. print 7B and -17 % for the quality of a 13B Chinchilla model and 2T served tokens."""
    spec = Size(parameters=13e9, served_tokens=2e12, law=law)
    found = spec.sheet()
    assert found["cheapest of this loss: parameters"] == pytest.approx(parameters * 1e9, rel=2e-3)
    assert found["trained on"] == pytest.approx(tokens * 1e12, rel=5e-3)
    assert found["change of FLOP"] == pytest.approx(change, abs=0.0005)
    assert sum("%" in one for one in found.verdicts) == len(LAWS)


def test_without_serving_the_cheapest_is_the_compute_optimal():
    for law in LAWS.values():
        parameters, tokens = law.compute_optimal(1e24)
        assert 6 * parameters * tokens == pytest.approx(1e24)
        assert law.chinchilla_tokens(parameters) == pytest.approx(tokens)
        best, long, cost = law.cheapest(law.loss(parameters, tokens), lambda n, d: 6 * n * d)
        assert best == pytest.approx(parameters, rel=1e-4) and long == pytest.approx(tokens, rel=1e-4)
        assert cost == pytest.approx(1e24, rel=1e-8)


def test_the_cheapest_beats_a_fine_grid():
    law, served = LAWS["besiroglu"], 5e12
    loss = law.loss(30e9, law.chinchilla_tokens(30e9))
    _, _, cost = law.cheapest(loss, lambda n, d: 6 * n * d + 2 * n * served)
    for step in range(1, 400):
        parameters = 8e9 * 1.01**step
        try:
            tokens = law.tokens_for(loss, parameters)
        except FitError:
            continue
        assert 6 * parameters * tokens + 2 * parameters * served >= cost * (1 - 1e-9)


def test_slow_decoding_asks_for_a_smaller_model_than_flops_do():
    money = {"train_mfu": 0.4, "prefill_mfu": 0.5, "decode_mfu": 0.02, "peak_tflops": 989.4, "usd_per_gpu_hour": 3.0}
    plain = Size(parameters=13e9, served_tokens=2e12).sheet()
    real = Size(parameters=13e9, served_tokens=2e12, **money).sheet()
    assert real["cheapest of this loss: parameters"] < plain["cheapest of this loss: parameters"]
    assert real["change of $"] < plain["change of FLOP"]
    same = Size(parameters=13e9, served_tokens=2e12, **{**money, "prefill_mfu": 0.4, "decode_mfu": 0.4}).sheet()
    assert same["change of $"] == pytest.approx(plain["change of FLOP"])


def test_what_cannot_be_is_said():
    with pytest.raises(SpecError, match="give parameters or flops"):
        Size.read({})
    with pytest.raises(SpecError, match="money needs train_mfu"):
        Size.read({"parameters": 1e9, "train_mfu": 0.4})
    with pytest.raises(FitError, match="do not reach a loss of 1"):
        LAWS["hoffmann"].tokens_for(1.8, 1e8)
