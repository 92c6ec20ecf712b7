"""Root-mean-square norm, written out: the oracle of the other backends."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 inside and in x's dtype outside. arXiv:1910.07467.

    With `offset` the product with weight + offset is made in float32 too. arXiv:2408.00118.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
    return (weight * normed.to(x.dtype)).to(x.dtype)
