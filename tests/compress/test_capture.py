"""Capture: what the states in front of a layer hold, and what they let go."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import torch

from hone.compress.calibration import Calibration
from hone.compress.capture import Flow
from hone.model.hf import Checkpoint


def test_the_embedding_is_let_go(tiny_llama: Path) -> None:
    flow = Flow(Calibration(np.arange(16).reshape(2, 8), None, {}), 1, "cpu", torch.float32)
    ends = Checkpoint(tiny_llama).build_ends(dtype=torch.float32)
    expected, embedding = ends.embedding[:16].detach().clone().view(2, 8, -1), weakref.ref(ends.embedding)
    flow.embed(ends)
    del ends
    assert torch.equal(flow.states, expected) and not flow.states.requires_grad
    assert embedding() is None


def test_dense_states_are_those_of_the_model_that_is_not_compressed(tiny_llama: Path) -> None:
    checkpoint = Checkpoint(tiny_llama)
    calibration = Calibration(np.arange(40).reshape(5, 8), None, {})
    flow = Flow(calibration, 2, "cpu", torch.float32, paired=True)

    ends = checkpoint.build_ends(dtype=torch.float32)
    flow.embed_dense(ends)
    ends.embed_tokens.weight = torch.nn.Parameter(ends.embedding.bfloat16().float())
    flow.embed(ends)
    plain = Flow(calibration, 2, "cpu", torch.float32)
    plain.embed(checkpoint.build_ends(dtype=torch.float32))
    assert plain.dense_states is None and torch.equal(flow.dense_states, plain.states)
    assert not torch.equal(flow.states, plain.states) and torch.equal(flow.states, plain.states.bfloat16().float())
    readers = {"mixer_norm": ["mixer.qkv"]}
    for index in range(2):
        layer = checkpoint.build_layer(index, dtype=torch.float32)
        before = flow.states.clone()
        if index == 0:
            found = flow.statistics(layer, readers, {"cross"})["mixer.qkv"]
            assert found.keys() == {"cross"} and found["cross"].abs().max() > 0
            assert torch.equal(flow.states, before)
        else:  # as after an interruption
            flow.dense_through(layer)
        plain.through(layer)
        assert torch.equal(flow.dense_states, plain.states)
