"""Root-mean-square normalisation as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hone.ops import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis. Zhang and Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), in one pass over memory on a GPU."""
        return rms_norm(x, self.weight, self.eps, residual)


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (offset + weight): Gemma's norm, whose weights are stored less 1. arXiv:2408.00118."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__(size, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, self.eps, residual, offset=self.offset)


def rms_norm_of(size: int, eps: float, offset: float = 0.0) -> RMSNorm:
    """The module of a `NormSpec`."""
    return OffsetRMSNorm(size, eps, offset) if offset else RMSNorm(size, eps)
