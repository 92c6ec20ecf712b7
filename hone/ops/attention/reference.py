"""Softmax attention as formulas: the reference of every kernel, and the CPU path for options that torch's attention lacks."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.attention.masks import CAUSAL, Mask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention: q [B, Sq, H, Dh], k [B, Sk, KV, Dh], v [B, Sk, KV, Dv] -> out [B, Sq, H, Dv], lse.

    lse [B, H, Sq] is the natural log of the sum of exponentials, in float32 (float64 for float64 inputs). A query without
    keys has out 0 and lse -inf. `hone.ops.attend` documents the rest. arXiv:1706.03762.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2).to(exact), v.repeat_interleave(groups, dim=2).to(exact)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(exact), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask.kept_dense(q.shape[1], k.shape[1], q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True) if k.shape[1] else scores.new_zeros(*scores.shape[:3], 1)
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total, v).to(q.dtype)
    lse = (highest + total.log()).masked_fill(blind, float("-inf"))
    return out, lse.squeeze(-1)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    mask: Mask = CAUSAL,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes and dtypes of q, k, v; out and lse may be those of more keys than these.

    With p = exp(s - lse): dv = p^T d_out, ds = p (d_out v^T - sum(d_out out)). Dao et al. 2022, arXiv:2205.14135, appendix B.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = k.repeat_interleave(groups, dim=2).to(exact), v.repeat_interleave(groups, dim=2).to(exact)
    wide_q, d_out = q.to(exact), d_out.to(exact)
    scores = torch.einsum("bqhd,bkhd->bhqk", wide_q, wide_k).mul_(scale)  # in place: they are far larger than all else
    slope = None
    if softcap is not None:
        bent = torch.tanh_(scores.div_(softcap))
        scores, slope = softcap * bent, 1 - bent.square()
    seen = mask.kept_dense(q.shape[1], k.shape[1], q.device)
    weights = scores.sub_(lse.to(exact)[..., None]).exp_().masked_fill_(~seen, 0.0)
    d_v = torch.einsum("bhqk,bqhd->bkhd", weights, d_out)
    share = (d_out * out.to(exact)).sum(-1).transpose(1, 2)
    d_scores = torch.einsum("bqhd,bkhd->bhqk", d_out, wide_v).sub_(share[..., None]).mul_(weights)
    d_scores = d_scores if slope is None else d_scores.mul_(slope)
    d_q = torch.einsum("bhqk,bkhd->bqhd", d_scores, wide_k) * scale
    d_k = torch.einsum("bhqk,bqhd->bkhd", d_scores, wide_q) * scale
    d_k, d_v = (made.unflatten(2, (-1, groups)).sum(3) for made in (d_k, d_v))
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
