"""The gates of feed-forwards as formulas: the reference that the other backends are tested against."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of the halves of the last axis, gelu by its tanh approximation: [..., 2F] -> [..., F]. arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha gate), gate at most `limit`, up from -limit to limit: [..., 2F] -> [..., F]. arXiv:2508.10925."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * (gate * alpha).sigmoid())
