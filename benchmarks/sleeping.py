"""A pipeline stage whose passes sleep given times instead of computing, with which the executor's order and waiting are timed alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, INPUTS, WEIGHTS, STEP = 0.050, 0.060, 0.040, 0.030
"""Seconds of a sleeping pass."""


def slow(compute: Callable[[Any], None]) -> Callable[[Any], None]:
    """`compute`, the gradients of a stage's weights, after the seconds of W."""

    def later(key: Any) -> None:
        time.sleep(WEIGHTS)
        compute(key)

    return later


class _Sleep(torch.autograd.Function):
    """y = x w; both directions sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any) -> Tensor:
        time.sleep(FORWARD)
        ctx.module = module
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        time.sleep(INPUTS if ctx.module.deferred() else INPUTS + WEIGHTS)
        return grad, torch.zeros(1), None


class Sleeping(nn.Module):
    """A stage whose passes sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def deferred(self) -> bool:
        """Whether the weights' part of the backward pass under way sleeps later."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        """x of the same shape."""
        return _Sleep.apply(x, self.weight, self)
