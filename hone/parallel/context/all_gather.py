"""Attention to gathered keys: every rank gets all keys and values of the layer, and attends to those before its queries.

Legend as in `layout`; H query heads, KV key heads, Dh and Dv head widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.ops import attend, attend_backward
from hone.ops.attention.api import add_sinks, sinks_gradient
from hone.parallel.axis import Axis
from hone.parallel.context.layout import Layout


def all_gather(
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

    Keys and values of the whole sequence are on every rank while a layer computes (small with few key heads); the backward
    pass gathers them again, and sums their gradients in float32 to the rank that each belongs to. Any mask costs one call for
    each chunk of queries. Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2.
    """
    return _Gathered.apply(q, k, v, sinks, layout, axis, window, {"scale": scale, "softcap": softcap})


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: Layout,
        axis: Axis,
        window: int | None,
        options: dict[str, Any],
    ) -> Tensor:
        every_k, every_v = _gathered((k, v), layout, axis)
        outs, lses = [], []
        for queries, keys, mask in layout.gathered(window):
            out, lse = attend(q[:, queries], every_k[:, keys], every_v[:, keys], mask, **options, return_lse=True)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 1), torch.cat(lses, 2)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = layout, axis, window, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        layout, axis, window, options = ctx.rest
        exact = torch.promote_types(q.dtype, torch.float32)
        every_k, every_v = _gathered((k, v), layout, axis)
        d_q = []
        d_k, d_v = (torch.zeros(part.shape, dtype=exact, device=q.device) for part in (every_k, every_v))
        for queries, keys, mask in layout.gathered(window):
            some_q, some_out, some_d = (part[:, queries] for part in (q, out, d_out))
            parts = attend_backward(
                some_q, every_k[:, keys], every_v[:, keys], some_out, lse[..., queries], some_d, mask, **options
            )
            d_q.append(parts[0])
            d_k[:, keys] += parts[1]
            d_v[:, keys] += parts[2]
        own_k, own_v = _summed((d_k, d_v), layout, axis)
        d_sinks = None if sinks is None else sinks_gradient(out, lse, d_out, sinks)
        return torch.cat(d_q, 1), own_k.to(k.dtype), own_v.to(v.dtype), d_sinks, None, None, None, None


def _gathered(parts: tuple[Tensor, ...], layout: Layout, axis: Axis) -> list[Tensor]:
    """Each of `parts` [B, s, ...] of every rank, in the order of the sequence: [B, S, ...]."""
    rooms = [part.new_empty(axis.size * part.numel()) for part in parts]
    moving = [axis.all_gather(room, part.reshape(-1)) for room, part in zip(rooms, parts, strict=True)]
    for transfer in moving:
        if transfer is not None:
            transfer.wait()
    found = []
    for room, part in zip(rooms, parts, strict=True):
        ranks = room.view(axis.size, *part.shape)
        first, last = ranks[:, :, : layout.chunk], ranks[:, :, layout.chunk :]
        found.append(torch.cat([*first.unbind(0), *reversed(last.unbind(0))], 1))
    return found


def _summed(wholes: tuple[Tensor, ...], layout: Layout, axis: Axis) -> list[Tensor]:
    """The sum over the ranks of this one's tokens of each of `wholes` [B, S, ...]: [B, s, ...]."""
    found, moving = [], []
    for whole in wholes:
        chunks = whole.split(layout.chunk, 1)
        ranks = [
            torch.cat([chunks[rank], chunks[-1 - rank]], 1) if layout.zigzag else chunks[rank]
            for rank in range(axis.size)
        ]
        part = torch.empty_like(ranks[0])
        moving.append(axis.reduce_scatter(part.view(-1), torch.stack(ranks).view(-1)))
        found.append(part)
    for transfer in moving:
        if transfer is not None:
            transfer.wait()
    return found
