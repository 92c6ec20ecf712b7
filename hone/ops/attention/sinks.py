"""Attention sinks: one learned score a head that joins the softmax without a value, added to finished attention.

Xiao et al. 2023, arXiv:2309.17453. Legend: B batch, S queries, H query heads, Dv width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention whose softmax has one more score a head, sinks [H], from those without: exact and differentiable.

    out [B, S, H, Dv], lse [B, H, S] (-inf where a query attends to no key): the shares of all keys shrink by
    sigmoid(lse - sink).
    """
    scores = sinks.to(lse.dtype)[:, None]
    kept = torch.sigmoid(lse - scores)
    return (out * kept.transpose(1, 2)[..., None]).to(out.dtype), torch.logaddexp(lse, scores)


def sinks_gradient(out: Tensor, lse: Tensor, d_out: Tensor, sinks: Tensor) -> Tensor:
    """The gradient by sinks [H] of attention with them, from its (out, lse) and the gradient of out; that of lse is zero.

    A sink is a key whose value is zero: its score's gradient is -share * (out . d_out), summed over all queries.
    """
    exact = torch.promote_types(out.dtype, torch.float32)
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    told = (out.to(exact) * d_out.to(exact)).sum(-1).transpose(1, 2)
    return -(share * told).sum((0, 2)).to(sinks.dtype)
