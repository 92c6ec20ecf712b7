"""Each op in plain torch, right in any floating dtype: the oracle of every fast twin and the CPU path.

Legend: B batch, S sequence, H query heads, KV key/value heads, Dh head width, D hidden width, V vocabulary, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 inside and in x's dtype outside. arXiv:1910.07467."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + Dh/2]) of x [..., heads, Dh] by the angles in cos, sin [..., 1, Dh/2]. arXiv:2104.09864."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Softmax attention written out: q [B, S, H, Dh], k and v [B, S, KV, Dh] -> [B, S, H, Dh]. arXiv:1706.03762.

    H is a multiple of KV (consecutive query heads share a key head). With `window` w a token sees itself and the
    w - 1 before it. `document_ids` [B, S] keeps documents apart. Inputs in float64 give an answer in float64.
    """
    seq_len, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    place = torch.arange(seq_len, device=q.device)
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device)
    if causal:
        seen &= place[None, :] <= place[:, None]
    if window is not None:
        seen &= place[None, :] > place[:, None] - window
    seen = seen[None, None]
    if document_ids is not None:
        seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)
