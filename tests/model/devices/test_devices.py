"""Simulated devices: a decoder's linears run on them, a training gets used to their noise, and what they cannot hold is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hone
from hone.base.errors import SpecError
from hone.eval.score import score
from hone.eval.stage import Eval, evaluate
from hone.model.decoder import build
from hone.model.devices import DEVICES
from hone.model.devices.base import refuse
from hone.model.devices.run import NoisyLinears, OnDevice, simulate
from hone.model.shape import Shape
from tests.eval.test_stage import TEXTS, write_data

IDEAL = {
    "analog": {"after_s": 0.0, "dac_bits": 0, "adc_bits": 0, "output_noise": 0.0, "clip": 0.0},
    "optical": {"photons": 0.0, "input_bits": 0, "weight_bits": 0, "output_bits": 0},
    "spiking": {"steps": 16, "code": "binary", "percentile": 100.0},
}
"""Fields with which a device is nearly, or exactly, a digital product."""
NEAR = {"analog": 0.25, "optical": 1e-4, "spiking": 2e-3}
"""What the loss may differ by: writing errs also in an ideal readout."""


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, 256)


def device(kind: str, **fields: object):
    return DEVICES[kind](kind=kind, **fields)


@pytest.mark.parametrize("kind", DEVICES)
def test_a_nearly_ideal_device_scores_nearly_alike(kind, tiny_llama, tokens):
    expected = score(hone.load(tiny_llama), tokens, window=64).mean_loss
    model = hone.load(tiny_llama)
    counts = simulate(model, device(kind, **IDEAL[kind]))
    assert score(model, tokens, window=64).mean_loss == pytest.approx(expected, abs=NEAR[kind])
    multiplied = sum(
        linear.in_features * linear.out_features for layer in model.layers for linear in layer.modules() if isinstance(linear, OnDevice)
    )  # fmt: skip
    assert counts["macs"] % multiplied == 0 and counts["macs"] >= len(tokens) * multiplied


@pytest.mark.parametrize(
    ("kind", "worse"),
    [
        ("analog", {"after_s": 3e7, "drift_compensation": False}),
        ("optical", {"photons": 0.1}),
        ("spiking", {"steps": 2}),
    ],
)
def test_a_bad_device_scores_worse(kind, worse, tiny_llama, tokens):
    def loss(**fields: object) -> float:
        model, reference = hone.load(tiny_llama), hone.load(tiny_llama)
        simulate(model, device(kind, **fields))
        found = score(model, tokens, window=64, reference=reference).mean_kl
        assert found is not None
        return found

    assert loss(**worse) > 3 * loss(**IDEAL[kind])


def test_noise_is_that_of_the_seed(tiny_llama, tokens):
    def loss(seed: int) -> float:
        model = hone.load(tiny_llama)
        simulate(model, device("analog", seed=seed))
        return score(model, tokens, window=64).mean_loss

    assert loss(0) == loss(0) != loss(1)


@pytest.mark.parametrize("kind", DEVICES)
def test_training_computes_with_noise_and_evaluates_without(kind):
    torch.manual_seed(0)
    model = build(Shape(num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=2).config(64, None, 0), seed=0)
    ids = torch.arange(24).view(1, -1)
    with torch.no_grad():
        clean = model(ids)
    noise = NoisyLinears(model, device(kind, **({"steps": 3} if kind == "spiking" else {})))
    with torch.no_grad():
        assert torch.equal(model(ids), clean)
    noise.begin(None, 1)
    first, again = model(ids), model(ids)
    assert torch.equal(first, again) and not torch.allclose(first, clean, atol=1e-5)
    first.square().mean().backward()
    weight = noise.linears[0].weight
    assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.count_nonzero()
    if kind != "spiking":  # it has no noise, only levels
        noise.begin(None, 2)
        assert not torch.allclose(model(ids), first, atol=1e-6)


def test_what_a_device_cannot_hold_is_refused():
    experts = Shape(num_layers=1, feed_forward={"kind": "moe", "num_experts": 4}).config(64, None, 0)
    with pytest.raises(SpecError, match="4 experts"):
        refuse(experts, False, "model")
    plain = Shape(num_layers=1).config(64, None, 0)
    with pytest.raises(SpecError, match="quantized"):
        refuse(plain, True, "model")
    refuse(plain, False, "model")


def test_the_stage_says_that_its_figures_are_simulated(tiny_llama, tmp_path):
    data = write_data(tmp_path / "data-hand", tiny_llama, TEXTS)
    fields = {"simulated_device": {"kind": "spiking", "steps": 8}}
    made = evaluate(tmp_path / "eval-spiking", tiny_llama, data, **fields)
    assert "simulated on spiking" in made.figures["perplexity"].note
    spikes = made.figures["simulated_spikes_per_token"]
    assert spikes.value > 0 and "simulated" in spikes.note
    plain = evaluate(tmp_path / "eval-plain", tiny_llama, data)
    assert plain.figures["perplexity"].value != made.figures["perplexity"].value
    assert json.loads(Eval(**fields).model_dump_json())["simulated_device"]["steps"] == 8


def test_a_binary_code_has_no_more_bits_than_float32():
    with pytest.raises(SpecError, match="float32 carries 24"):
        DEVICES.read({"kind": "spiking", "code": "binary", "steps": 25})
    assert DEVICES.read({"kind": "spiking", "steps": 1024}).steps == 1024
