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


def shrink(x: Tensor, downs: Tensor, slots: Tensor, ranks: Tensor) -> Tensor:
    """As `hone.ops.lora_shrink`, one product a slot: float32 [1, T, P, R], zero where there is nothing."""
    pieces = ranks.shape[1]
    out = x.new_zeros(len(x), pieces, downs.shape[1] // pieces, dtype=torch.promote_types(x.dtype, torch.float32))
    for slot in _present(slots):
        rows = torch.nonzero(slots == slot).flatten()
        whole = (x[rows] @ downs[slot].T).to(out.dtype).unflatten(-1, out.shape[1:])
        beyond = torch.arange(out.shape[2], device=x.device) >= ranks[slot][:, None]
        out[rows] = whole.masked_fill(beyond, 0)
    return out[None]


def expand(
    narrow: Tensor,
    ups: Tensor,
    slots: Tensor,
    ranks: Tensor,
    y: Tensor,
    widths: Sequence[int],
    factors: Tensor | None = None,
) -> Tensor:
    """As `hone.ops.lora_expand`, one product a slot and piece."""
    for slot in _present(slots):
        rows = torch.nonzero(slots == slot).flatten()
        part = y[rows]
        if factors is not None:
            part = (part * factors[slot, :, 0] + factors[slot, :, 1]).to(y.dtype)
        begin = 0
        for piece, (width, rank) in enumerate(zip(widths, ranks[slot].tolist(), strict=True)):
            up = ups[slot, begin : begin + width, :rank]
            part[:, begin : begin + width] += narrow[:, rows, piece, :rank].sum(0).to(y.dtype) @ up.T
            begin += width
        y[rows] = part
    return y


def _present(slots: Tensor) -> list[int]:
    return [slot for slot in slots.unique().tolist() if slot >= 0]
