"""A frozen linear with LoRA factors as a formula, for autograd: the reference, and what torch.compile fuses.

Shapes: T tokens, K input features, N output features, r rank of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    begins: Sequence[int],
    scale: float,
) -> Tensor:
    """As `hone.ops.lora_linear`, of the weight [N, K] itself and of the inputs of the linear."""
    y, added, end = F.linear(x, weight, bias), list[Tensor](), 0
    for down, up, begin in zip(downs, ups, begins, strict=True):
        gap = x.new_zeros(*x.shape[:-1], begin - end)
        added += [gap, F.linear(F.linear(x, down), up) * scale]
        end = begin + len(up)
    return y + torch.cat([*added, x.new_zeros(*x.shape[:-1], len(weight) - end)], -1)
