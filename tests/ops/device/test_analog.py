"""Conductances have the moments of their published formulas; a tile without noise and converters is a product."""

from __future__ import annotations

import math

import pytest
import torch

from hone.ops.device.analog import (
    analog_linear,
    conductances,
    drift_exponent,
    pairs,
    programmed,
    reading_spread,
    writing_spread,
    written_noise,
)
from hone.ops.device.converters import converted, scaled

DEVICES = 400_000
IDEAL = {"tile": 64, "dac_bits": 0, "adc_bits": 0, "output_bound": 1e9, "output_noise": 0.0, "generator": None}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_writing_errs_as_was_measured_in_microsiemens():
    """0.26348 + 1.965 g - 1.1731 g^2 uS of 25: Nandakumar et al. 2019."""
    spread = writing_spread(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    assert (25 * spread).tolist() == pytest.approx([0.26348, 0.952705, 1.05538], abs=1e-6)


@pytest.mark.parametrize("g", [0.3, 0.6, 1.0])
def test_freshly_written_conductances_have_the_spread_of_writing_and_one_read(g):
    target = torch.full((DEVICES,), g)
    found = conductances(target, 0.0, seeded())
    read = reading_spread(target, target, 20.0)
    expected = torch.hypot(writing_spread(target), read)[0].item()
    assert found.mean().item() == pytest.approx(g, rel=2e-3)
    assert found.std().item() == pytest.approx(expected, rel=0.02)


def test_conductances_drift_by_their_exponent():
    """Mean of g (t / 20 s)^-nu over normal nu, which is a lognormal's mean."""
    g, after = 0.5, 31_536_000.0
    target = torch.full((DEVICES,), g)
    mean, spread = (one[0].item() for one in drift_exponent(target))
    assert mean == pytest.approx(0.049) and spread == pytest.approx(0.008)  # both at their bounds there
    log = math.log((after + 20.0) / 20.0)
    expected = g * math.exp(-mean * log + (spread * log) ** 2 / 2)
    assert conductances(target, after, seeded()).mean().item() == pytest.approx(expected, rel=3e-3)


def test_small_conductances_drift_faster():
    mean, spread = drift_exponent(torch.tensor([1.0, 0.01]))
    assert mean.tolist() == pytest.approx([0.049, -0.0155 * math.log(0.01) + 0.0244])
    assert spread.tolist() == pytest.approx([0.008, 0.045])


def test_a_pair_of_which_one_is_zero_holds_each_weight():
    weight = torch.randn(8, 32, generator=seeded())
    plus, minus, scale = pairs(weight, 0.0)
    assert torch.minimum(plus, minus).count_nonzero() == 0
    torch.testing.assert_close(scale * (plus - minus), weight)
    assert plus.max() <= 1 and minus.max() <= 1


def test_clipping_bounds_weights_by_their_output_s_root_mean_square():
    weight = torch.ones(1, 64)
    weight[0, 0] = 50.0
    plus, _, scale = pairs(weight, 2.0)
    bound = 2.0 * weight.square().mean().sqrt()
    assert (scale * plus).max().item() == pytest.approx(bound.item())
    assert (scale * plus)[0, 1].item() == pytest.approx(1.0)


def test_an_ideal_tile_is_the_product():
    x, weight = torch.randn(5, 200, generator=seeded(1)), torch.randn(7, 200, generator=seeded(2))
    plus, minus, scale = pairs(weight, 0.0)
    torch.testing.assert_close(analog_linear(x, plus - minus, scale, **IDEAL), x @ weight.T, rtol=1e-5, atol=1e-4)


def test_compensation_returns_what_drift_took_from_the_mean():
    weight = torch.randn(64, 256, generator=seeded())
    ratios = {}
    for compensated in (False, True):
        held, scale = programmed(
            weight, after_s=31_536_000.0, clip=0.0, compensated=compensated, generator=seeded(3), tile=256
        )
        ratios[compensated] = ((held * scale) * weight).sum().item() / weight.square().sum().item()
    assert ratios[False] < 0.6
    assert ratios[True] == pytest.approx(1.0, abs=0.06)


def test_the_noise_of_training_is_that_of_writing():
    relative = torch.full((DEVICES,), -0.5)
    pair = torch.hypot(writing_spread(torch.tensor(0.5)), writing_spread(torch.tensor(0.0))).item()
    assert written_noise(relative, seeded()).std().item() == pytest.approx(pair, rel=0.01)


def test_converters_round_to_their_steps_and_clip():
    values = torch.tensor([-2.0, -0.26, 0.0, 0.1, 0.26, 0.9])
    assert converted(values, 3).tolist() == pytest.approx([-1.0, -1 / 3, 0.0, 0.0, 1 / 3, 1.0])
    assert converted(values, 0).tolist() == values.tolist()
    assert len(converted(torch.linspace(-3, 3, 1000), 7, 2.0).unique()) == 2**7 - 1


def test_scaling_leaves_zeros():
    part, scale = scaled(torch.tensor([[0.0, 0.0], [2.0, -4.0]]))
    assert part.tolist() == [[0.0, 0.0], [0.5, -1.0]] and scale.flatten().tolist() == [1.0, 4.0]


def test_adc_bits_add_the_noise_of_rounding():
    """Errors of a fine converter are those of rounding: a step over the square root of 12, of each tile's sum."""
    x, weight = torch.rand(400, 64, generator=seeded(1)), torch.rand(50, 64, generator=seeded(2)) - 0.5
    plus, minus, scale = pairs(weight, 0.0)
    told = IDEAL | {"adc_bits": 9, "output_bound": 12.0}
    error = analog_linear(x, plus - minus, scale, **told) - x @ weight.T
    step = 12.0 / 255 * x.amax(1, keepdim=True) * scale.squeeze(-1)
    assert (error / step).square().mean().sqrt().item() == pytest.approx(1 / math.sqrt(12), rel=0.05)
