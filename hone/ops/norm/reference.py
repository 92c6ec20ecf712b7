"""Root-mean-square norm as a formula: the reference that the other backends are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, in x's dtype. arXiv:1910.07467.

    With `offset` the product with weight + offset is computed in float32 too. arXiv:2408.00118.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
    return (weight * normed.to(x.dtype)).to(x.dtype)
