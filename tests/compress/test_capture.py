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
