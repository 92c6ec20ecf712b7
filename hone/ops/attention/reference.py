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
