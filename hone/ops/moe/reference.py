"""Tokens sorted by expert and back, and one product per expert, in plain torch: the kernels' reference, and the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.moe.weights import ExpertWeights


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`hone.ops.grouped_linear`: one product per expert."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ own.T for rows, own in zip(x.split(sizes), weight.unbind())])


def grouped_sums(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The sum over each expert's rows of dy [T, N] times x [T, K]: [E, N, K], the gradient of `grouped_linear` by its weight."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.stack([one.T @ rows for one, rows in zip(dy.split(sizes), x.split(sizes), strict=True)])


def permute(x: Tensor, expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`hone.ops.permute`: a stable sort."""
    flat, top_k = expert_ids.flatten(), expert_ids.shape[1]
    order = flat.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).to(torch.int32)
    return x[order // top_k], ends, place.view(-1, top_k).to(torch.int32)


def unpermute(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """`hone.ops.unpermute`, summed in float32 or wider."""
    rows = y[place.flatten().long()].view(*place.shape, y.shape[1])
    wide = rows.to(torch.promote_types(y.dtype, torch.float32))
    return (wide if weights is None else wide * weights[..., None].to(wide.dtype)).sum(1).to(y.dtype)


def choose_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, *, sigmoid: bool, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`hone.ops.choose_experts`, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide))
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ids = (scores if bias is None else scores + bias).topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return ids.to(torch.int32), (weights * scale).float()


def expert_swiglu(x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeights, down: ExpertWeights) -> Tensor:
    """`hone.ops.expert_swiglu`: one expert after another, of which only those with tokens are widened."""
    rows, ends, place = permute(x, ids.long(), gate_up.sizes[0])
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    made = []
    for expert, own in enumerate(rows.split(sizes)):
        if len(own):
            first, second = (one.expert(expert).dequantize(x.dtype)[0] for one in (gate_up, down))
            gate, up = F.linear(own, first).chunk(2, -1)
            made.append(F.linear(F.silu(gate) * up, second))
    return unpermute(torch.cat(made) if made else rows, place, weights)
