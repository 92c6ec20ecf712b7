"""Light's noise is that of counting photons; spikes carry the codes of a quantizer."""

from __future__ import annotations

import pytest
import torch

from hone.ops.device.optical import optical_linear
from hone.ops.device.spiking import fire, spike_values, spiking_linear, thresholds

EXACT = {"block": 64, "input_bits": 0, "weight_bits": 0, "output_bits": 0}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_without_noise_and_codes_light_multiplies():
    x, weight = torch.randn(6, 100, generator=seeded(1)), torch.randn(9, 100, generator=seeded(2))
    found, detected = optical_linear(x, weight, **EXACT, photons=0.0, thermal=0.0, generator=seeded())
    assert detected == 0
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("photons", "thermal"), [(4.0, 0.0), (100.0, 0.0), (4.0, 3.0)])
def test_shot_noise_is_that_of_counting_photons(photons, thermal):
    """Against a Poisson draw of the photons of each product's magnitude, which is what a detector counts."""
    k, draws = 32, 20_000
    x, weight = torch.rand(1, k, generator=seeded(1)), torch.rand(1, k, generator=seeded(2))
    x[0, 0] = weight[0, 0] = 1.0  # so that the scales are 1
    generator = seeded(3)
    found, detected = optical_linear(
        x.expand(draws, k), weight, **EXACT, photons=photons, thermal=thermal, generator=generator
    )
    assert detected.item() == pytest.approx(draws * photons * (x * weight).sum().item(), rel=1e-4)
    counted = torch.poisson((photons * (x * weight).sum()).expand(draws), generator=generator)
    counted = (counted + thermal * torch.randn(draws, generator=generator)) / photons
    assert found.mean().item() == pytest.approx(counted.mean().item(), rel=0.02)
    assert found.std().item() == pytest.approx(counted.std().item(), rel=0.03)


def test_codes_of_a_block_share_its_scale():
    x = torch.ones(1, 128)
    x[0, 64:] = 1e-3
    found, _ = optical_linear(
        x,
        torch.ones(1, 128),
        block=64,
        input_bits=4,
        weight_bits=4,
        output_bits=0,
        photons=0,
        thermal=0,
        generator=None,
    )
    assert found.item() == pytest.approx(64 + 0.064, rel=1e-5)  # one scale for all 128 would lose the second block


@pytest.mark.parametrize("steps", [1, 4, 16, 33])
def test_integrate_and_fire_neurons_round_to_steps_levels(steps):
    x = torch.linspace(-1.3, 1.3, 2001).view(1, -1)
    most = torch.ones(1, 1)
    spikes = fire(x, most, steps, "rate")
    assert set(spikes.unique().tolist()) <= {-1.0, 0.0, 1.0}
    carried = spikes.sum(0)
    exact = x.clamp(-1, 1) * steps
    assert (carried - exact).abs().max() <= 0.5 + 1e-4
    away = (exact.abs() % 1 - 0.5).abs() > 1e-3  # ties may go either way
    assert torch.equal(carried[away], exact.round()[away])


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_binary_weighted_spikes_carry_codes_exactly(bits):
    """A signed code of so many bits, in as many steps."""
    levels = 2**bits - 1
    codes = torch.arange(-levels, levels + 1).view(1, -1).float()
    spikes = fire(codes / levels, torch.ones(1, 1), bits, "binary")
    values = spike_values(torch.ones(1, 1), bits, "binary")
    torch.testing.assert_close((spikes * values).sum(0) * levels, codes, rtol=0, atol=1e-3)


def test_thresholds_are_percentiles_of_a_token():
    x = torch.cat([torch.full((1, 99), 0.5), torch.tensor([[40.0]])], 1)
    assert thresholds(x, 90.0).item() == pytest.approx(0.5)
    assert thresholds(x, 100.0).item() == pytest.approx(40.0)
    assert thresholds(torch.zeros(1, 4), 99.0).item() == 1.0


def test_more_steps_come_closer_and_spikes_are_counted():
    x, weight = torch.randn(20, 64, generator=seeded(1)), torch.randn(10, 64, generator=seeded(2))
    exact, errors = x @ weight.T, []
    for steps in (4, 16, 64):
        found, spikes = spiking_linear(x, weight, steps=steps, code="rate", percentile=100.0)
        errors.append((found - exact).square().mean().item())
        most = x.abs().amax(1, keepdim=True)
        counted = ((x.abs() / most) * steps).round().sum().item()
        assert spikes.item() == pytest.approx(counted, abs=5)
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
