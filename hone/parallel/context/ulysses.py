"""Ulysses: two exchanges turn parts of the sequence with all heads into whole sequences with a part of the heads.

Legend as in `layout`; H query heads, KV key heads, Dh and Dv head widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.ops import attend
from hone.parallel.axis import Axis
from hone.parallel.context.chunks import check_heads
from hone.parallel.context.layout import Layout


def ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    axis: Axis,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's q [B, s, H, Dh] to every rank's k [B, s, KV, Dh], v [B, s, KV, Dv]: [B, s, H, Dv].

    Each rank computes H / n heads of the whole sequences, under any mask, with whichever kernel one device uses. The layout
    is not zigzag. Key heads that are fewer than ranks are sent to several of them. Raises SpecError when the heads do not
    divide. Jacobs et al. 2023, arXiv:2309.14509.
    """
    assert not layout.zigzag, "the exchange joins chunks in the order of the ranks"
    check_heads(q.shape[2], k.shape[2], axis.size)
    if k.shape[2] % axis.size:
        copies = axis.size // k.shape[2]
        k, v = k.repeat_interleave(copies, 2), v.repeat_interleave(copies, 2)
    q, k, v = _Exchange.apply(axis, True, q, k, v)
    sinks = None if sinks is None else sinks.chunk(axis.size)[axis.index]
    out = attend(q, k, v, layout.whole(window), scale=scale, softcap=softcap, sinks=sinks)
    return _Exchange.apply(axis, False, out)[0]


class _Exchange(torch.autograd.Function):
    """[B, s, H, D] of every rank to [B, S, H / n, D], or (not `by_heads`) back; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, by_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rest = axis, by_heads
        return _exchanged(axis, by_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        axis, by_heads = ctx.rest
        return (None, None, *_exchanged(axis, not by_heads, grads))


def _exchanged(axis: Axis, by_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    cut, join = (2, 1) if by_heads else (1, 2)
    sent = [tensor.unflatten(cut, (axis.size, -1)).movedim(cut, 0).contiguous() for tensor in tensors]
    taken = [torch.empty_like(parts) for parts in sent]
    for transfer in [axis.all_to_all(x, parts) for x, parts in zip(taken, sent, strict=True)]:
        if transfer is not None:
            transfer.wait()
    return tuple(parts.movedim(0, join).flatten(join, join + 1) for parts in taken)
