"""Activation checkpointing: the same loss and gradients to the bit, and as much kept for the backward pass as estimated."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hone.base.errors import FitError, SpecError
from hone.cost.activations.segments import keep_all, layer_bytes, live_bytes, live_layers, recomputed_layers
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.training import Training
from hone.cost.train.update import adamw
from hone.feed.load import Batch, PackedTokens
from hone.measure.machine import describe
from hone.model.decoder import build
from hone.model.shape import Shape
from hone.train import ACTIVATION_CHECKPOINTINGS
from hone.train.activation_checkpointing import EveryNth, KeepAll, Segment, SquareRoot
from hone.train.activation_checkpointing.base import Sizes
from hone.train.activation_checkpointing.sizes import fitted, sizes_of
from hone.train.loop import run_layers, to_device
from hone.train.stage import Train
from tests.train.conftest import SHAPE

LAYERS = 9
NESTED = (Segment(0, 6, True, (Segment(0, 3, True, (Segment(0, 1, True), Segment(1, 3, False))), Segment(3, 6, False))),
          Segment(6, 8, True, saves="products"), Segment(8, 9, False))  # fmt: skip
PLANS = {
    "none": keep_all(LAYERS),
    "every": EveryNth(n=1).segments(LAYERS),
    "every second": EveryNth(n=2).segments(LAYERS),
    "sqrt": SquareRoot().segments(LAYERS),
    "listed": ACTIVATION_CHECKPOINTINGS.read({"kind": "layers", "layers": [1, 2, 6]}).segments(LAYERS),
    "nested": NESTED,
    **{name: ACTIVATION_CHECKPOINTINGS.read(name).segments(LAYERS) for name in ("full", "selective", "offload")},
    "full in threes": ACTIVATION_CHECKPOINTINGS.read({"kind": "full", "recompute_num_layers": 3}).segments(LAYERS),
    "offloaded inputs": ACTIVATION_CHECKPOINTINGS.read({"kind": "offload", "recompute": True}).segments(LAYERS),
    "optimal": ACTIVATION_CHECKPOINTINGS.read("optimal").segments(LAYERS, Sizes.alike(LAYERS, 3.5)),
    "memory_budget": ACTIVATION_CHECKPOINTINGS.read("memory_budget").segments(LAYERS, Sizes.alike(LAYERS, 2.0)),
}


def measure(segments, data_folder, shape=SHAPE):
    """(loss, gradients, bytes that autograd keeps between forward and backward beside weights)."""
    data = PackedTokens(data_folder)
    model = build(shape.model_copy(update={"num_layers": LAYERS}).config(data.vocab_size))
    tokens, _, context = to_device(data.batch(0, 4, 64, 0), torch.device("cpu"))
    kept: dict[int, int] = {}
    weights = {part.untyped_storage().data_ptr() for part in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = run_layers(model, tokens, context, segments)
    inputs = sum(kept.values())
    loss = (model.head(x).float() ** 2).mean()
    loss.backward()
    return loss.item(), {name: part.grad.clone() for name, part in model.named_parameters()}, inputs


@pytest.mark.parametrize("name", list(PLANS))
def test_loss_and_gradients_are_bit_identical(name, data_folder):
    loss, grads, _ = measure(PLANS["none"], data_folder)
    other, others, _ = measure(PLANS[name], data_folder)
    assert loss == other
    assert all(torch.equal(grads[part], others[part]) for part in grads)


@pytest.mark.parametrize("name", ["none", "every second", "listed", "sqrt"])
def test_kept_bytes_are_estimated_within_five_percent(name, data_folder):
    """The shape of the tiny recipe: what autograd keeps beside weights, and the closed form's turn."""
    shape = Shape(hidden_size=96, intermediate_size=256, max_seq_len=256)
    measured = measure(PLANS[name], data_folder, shape)[2]
    dims = shape.model_copy(update={"num_layers": LAYERS}).config(300).dims()
    sizes = [layer_bytes(one, dims.hidden_size, 4 * 64, 4, 64) for one in dims.layers]
    assert live_bytes(PLANS[name], sizes).turn == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 7, 9, 16, 25])
@pytest.mark.parametrize("name", list(ACTIVATION_CHECKPOINTINGS))
def test_segments_cover_every_layer_once(name, num_layers):
    segments = ACTIVATION_CHECKPOINTINGS.read(name).segments(num_layers, Sizes.alike(num_layers, num_layers / 3 + 2))
    assert [layer for part in segments for layer in range(part.start, part.stop)] == list(range(num_layers))
    assert 1 <= live_layers(segments) <= num_layers + 1  # a copy under way


def test_sqrt_segments():
    assert SquareRoot().segments(9) == (Segment(0, 3, True), Segment(3, 6, True), Segment(6, 9, False))
    assert live_layers(SquareRoot().segments(100)) == 10
    assert live_layers(EveryNth(n=1).segments(32)) == 1
    assert live_layers(KeepAll().segments(32)) == 32


def least_recomputed(num_layers, room):
    """Fewest forward passes of one layer more, by trying every nested plan of equal layers that holds at most `room`."""
    from functools import cache

    @cache
    def cost(length, left):
        if length == 0:
            return 0
        found = cost(length - 1, left - 1) if left >= 1 else 10**6
        for first in range(1, length):
            found = min(found, first + cost(first, left) + cost(length - first, left))
        return found

    return cost(num_layers, room)


@pytest.mark.parametrize(("num_layers", "room"), [(6, 2), (6, 3), (9, 3), (9, 5), (12, 4)])
def test_optimal_recomputes_as_little_as_any_plan(num_layers, room):
    policy = ACTIVATION_CHECKPOINTINGS.read({"kind": "optimal", "selective": False})
    segments = policy.segments(num_layers, Sizes.alike(num_layers, room))
    assert live_layers(segments) <= room
    assert len(recomputed_layers(segments)) == least_recomputed(num_layers, room)


def training(**changes):
    dims = Shape(num_layers=12, max_seq_len=256).config(2048).dims()
    return replace(Training(dims, 10, 16, 256, "float32", KeepAll().segments(12), adamw(dims)), **changes)


def test_more_bytes_never_take_longer_and_the_plan_keeps_to_them():
    machine, work = describe("cpu"), training()
    whole = growth_bytes(work, "cpu").value
    least = growth_bytes(replace(work, segments=EveryNth(n=1).segments(12)), "cpu").value
    times = []
    for share in (0.05, 0.3, 0.6, 1.0):
        room = least + share * (whole - least)
        policy = ACTIVATION_CHECKPOINTINGS.read({"kind": "optimal", "memory_bytes": room})
        found = fitted(work, policy, machine)
        assert growth_bytes(found, "cpu").value <= room
        times.append(sizes_of(work, machine).seconds(found.segments))
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert found.segments == keep_all(12)


def test_the_budget_takes_the_fastest_that_fits_and_says_so():
    machine, work = describe("cpu"), training()
    sizes = sizes_of(work, machine)
    ample = ACTIVATION_CHECKPOINTINGS.read({"kind": "memory_budget", "memory_bytes": 1e12})
    assert ample.segments(12, sizes) == keep_all(12) and "memory_budget: none" in ample.notes(12, sizes)[0]
    tight = ample.model_copy(update={"memory_bytes": 0.5 * sizes.growth(keep_all(12))})
    chosen = tight.segments(12, sizes)
    assert sizes.growth(chosen) <= tight.memory_bytes < sizes.growth(keep_all(12))
    assert any("does not fit" in line for line in tight.notes(12, sizes))


@pytest.mark.parametrize("kind", ["optimal", "memory_budget"])
def test_what_cannot_fit_says_which_micro_batches_do(kind):
    """None where they are single sequences already."""
    one = replace(training(), gradient_accumulation_steps=16)
    needed = [
        growth_bytes(replace(one, segments=EveryNth(n=1).segments(12), gradient_accumulation_steps=n), "cpu").value
        for n in (1, 16)
    ]
    policy = ACTIVATION_CHECKPOINTINGS.read({"kind": kind, "memory_bytes": sum(needed) / 2})
    with pytest.raises(FitError) as caught:
        policy.segments(12, sizes_of(training(), describe("cpu")))
    count = int(re.search(r"gradient_accumulation_steps to (\d+), with which", caught.value.fix)[1])
    policy.segments(12, sizes_of(replace(training(), gradient_accumulation_steps=count), describe("cpu")))
    few = policy.model_copy(update={"memory_bytes": 1e6})
    with pytest.raises(FitError) as caught:
        few.segments(12, sizes_of(one, describe("cpu")))
    assert "gradient_accumulation_steps" not in caught.value.fix


@pytest.mark.parametrize("kind", ["optimal", "memory_budget"])
def test_what_cannot_fit_says_the_least(kind):
    policy = ACTIVATION_CHECKPOINTINGS.read({"kind": kind, "memory_bytes": 1e6})
    with pytest.raises(FitError, match=r"the least this training can do with is") as caught:
        policy.segments(12, sizes_of(training(), describe("cpu")))
    assert (
        caught.value.fix.startswith("set memory_bytes to at least")
        and "gradient_accumulation_steps" not in caught.value.fix
    )
    with pytest.raises(SpecError, match="chooses by the sizes"):
        policy.segments(12)


@pytest.mark.parametrize("kind", ["selective", "optimal", "memory_budget", "offload"])
def test_what_compiled_layers_and_pipelines_refuse(kind):
    with pytest.raises(SpecError, match=f"activation_checkpointing {kind}"):
        Train.read({"compile": True, "activation_checkpointing": kind})
    with pytest.raises(SpecError, match=f"activation_checkpointing {kind} does not work with pipeline stages"):
        Train.read({"parallelism": {"pipeline_parallel_degree": 2}, "activation_checkpointing": kind})


def test_memory_of_offloaded_layers():
    work = training()
    away = replace(work, segments=ACTIVATION_CHECKPOINTINGS.read("offload").segments(12))
    assert growth_bytes(away, "cuda").value < 0.6 * growth_bytes(work, "cuda").value
    assert growth_bytes(away, "cpu").value >= growth_bytes(work, "cpu").value
    machine = describe("cpu")
    assert step_seconds(away, machine).value > step_seconds(work, machine).value, "a CPU copies beside nothing"
    tokens = np.zeros((2, 16), np.int64)
    model = build(SHAPE.config(64))
    inputs, _, context = to_device(Batch(tokens, tokens, np.zeros((2, 16), np.int32)), torch.device("cpu"))
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: held.append(one) or one, lambda one: one):
        run_layers(model, inputs, context, ACTIVATION_CHECKPOINTINGS.read("offload").segments(4))
    inner = [one for one in held if not isinstance(one, torch.nn.Parameter) and one.dim() == 4]
    assert len(inner) <= 6, "the heads of one layer, which stays"
