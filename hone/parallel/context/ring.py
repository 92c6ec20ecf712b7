"""Ring attention: keys and values go around the ranks, one block ahead of the work, and so do their gradients.

Legend as in `layout`; H query heads, KV key heads, Dh and Dv head widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.ops import attend, attend_backward, merge
from hone.ops.attention.api import add_sinks, sinks_gradient
from hone.parallel.axis import Axis, Transfer
from hone.parallel.context.layout import Layout


def ring(
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

    In n steps a rank attends to its own block, then to that of the rank before it, and so on; while it computes, the next
    block arrives. The parts are merged by their log-sum-exp, in float32 and exactly. The backward pass goes around again:
    with each block travels the float32 sum of its gradient, which is complete when it is home after n steps. A rank holds
    two blocks at a time, never the whole sequence. Liu et al. 2023, arXiv:2310.01889.
    """
    return _Ring.apply(q, k, v, sinks, layout, axis, window, {"scale": scale, "softcap": softcap})


class _Ring(torch.autograd.Function):
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
        exact = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty(0), torch.empty(0)
        held, shapes = _packed(k, v), (k.shape, v.shape)
        for step in range(axis.size):
            source = (axis.index - step) % axis.size
            arriving = torch.empty_like(held) if step < axis.size - 1 else None
            moving = None if arriving is None else axis.rotate(arriving, held)
            block = layout.block(source, window)
            if block is not None:
                some_k, some_v = (part[:, block.keys] for part in _unpacked(held, *shapes))
                some_q = q[:, block.queries]
                part = attend(some_q, some_k, some_v, block.mask, **options, return_lse=True)
                if step == 0:
                    out, lse = part[0].to(exact), part[1]
                else:
                    known = out[:, block.queries], lse[..., block.queries]
                    out[:, block.queries], lse[..., block.queries] = merge([known, part])
            if arriving is not None:
                _wait(moving)
                held = arriving
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = layout, axis, window, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        layout, axis, window, options = ctx.rest
        exact = torch.promote_types(q.dtype, torch.float32)
        held, shapes = _packed(k, v), (k.shape, v.shape)
        d_q = torch.zeros(q.shape, dtype=exact, device=q.device)
        sums, summing = torch.zeros(held.shape, dtype=exact, device=q.device), None
        for step in range(axis.size):
            source = (axis.index - step) % axis.size
            arriving = torch.empty_like(held) if step < axis.size - 1 else None
            moving = None if arriving is None else axis.rotate(arriving, held)
            block, parts = layout.block(source, window), None
            if block is not None:
                some_k, some_v = (part[:, block.keys] for part in _unpacked(held, *shapes))
                some_q, some_out, some_d = (part[:, block.queries] for part in (q, out, d_out))
                parts = attend_backward(
                    some_q, some_k, some_v, some_out, lse[..., block.queries], some_d, block.mask, **options
                )
            _wait(summing)  # the gradient of this block by the ranks before this one
            if block is not None and parts is not None:
                d_q[:, block.queries] += parts[0]
                for total, part in zip(_unpacked(sums, *shapes), parts[1:], strict=True):
                    total[:, block.keys] += part
            sent, sums = sums, torch.empty_like(sums)
            summing = axis.rotate(sums, sent)
            if arriving is not None:
                _wait(moving)
                held = arriving
        _wait(summing)
        d_k, d_v = _unpacked(sums, *shapes)
        d_sinks = None if sinks is None else sinks_gradient(out, lse, d_out, sinks)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, None, None, None, None


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """k and v in one flat tensor, which is one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(flat: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """(k, v), views of `flat`."""
    return flat[: k_shape.numel()].view(k_shape), flat[k_shape.numel() :].view(v_shape)


def _wait(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
