"""Activation checkpointing: the same loss and gradients to the bit, and less kept for the backward pass."""

from __future__ import annotations

import pytest
import torch

from hone.data.load import PackedTokens
from hone.model.decoder import build
from hone.train import ACTIVATION_CHECKPOINTINGS
from hone.train.activation_checkpointing import EveryNth, KeepAll, Segment, SquareRoot, live_layers
from hone.train.loop import run_layers, to_device
from tests.train.conftest import SHAPE

POLICIES = {
    "none": KeepAll(),
    "every": EveryNth(n=1),
    "every second": EveryNth(n=2),
    "sqrt": SquareRoot(),
}


def measure(policy, data_folder, num_layers=9):
    """(loss, gradients, bytes that autograd keeps between forward and backward)."""
    data = PackedTokens(data_folder)
    model = build(SHAPE.model_copy(update={"num_layers": num_layers}).config(data.vocab_size))
    batch = data.batch(0, 4, 64, 0)
    tokens, _, context = to_device(batch, torch.device("cpu"))
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = run_layers(model, tokens, context, policy.segments(num_layers))
    inputs = sum(kept.values())
    loss = (model.head(x).float() ** 2).mean()
    loss.backward()
    return loss.item(), {name: part.grad.clone() for name, part in model.named_parameters()}, inputs


@pytest.mark.parametrize("name", list(POLICIES))
def test_loss_and_gradients_are_bit_identical(name, data_folder):
    loss, grads, _ = measure(POLICIES["none"], data_folder)
    other, others, _ = measure(POLICIES[name], data_folder)
    assert loss == other
    assert all(torch.equal(grads[part], others[part]) for part in grads)


def test_less_is_kept(data_folder):
    kept = {name: measure(policy, data_folder)[2] for name, policy in POLICIES.items()}
    assert kept["every"] < 0.2 * kept["none"]
    assert kept["every second"] < 0.7 * kept["none"]
    assert kept["every"] < kept["sqrt"] < 0.6 * kept["none"]  # its last segment of three layers is kept whole


@pytest.mark.parametrize("num_layers", range(1, 40))
@pytest.mark.parametrize("name", list(ACTIVATION_CHECKPOINTINGS))
def test_segments_cover_every_layer_once(name, num_layers):
    segments = ACTIVATION_CHECKPOINTINGS.read(name).segments(num_layers)
    assert [layer for part in segments for layer in range(part.start, part.stop)] == list(range(num_layers))
    assert 1 <= live_layers(segments) <= num_layers
    estimates = ACTIVATION_CHECKPOINTINGS.read(name).estimates(num_layers=num_layers)
    assert 0 <= estimates["recomputed_share"].value <= 1


def test_sqrt_segments():
    assert SquareRoot().segments(9) == (Segment(0, 3, True), Segment(3, 6, True), Segment(6, 9, False))
    assert live_layers(SquareRoot().segments(100)) == 10
    assert live_layers(EveryNth(n=1).segments(32)) == 1
    assert live_layers(KeepAll().segments(32)) == 32
