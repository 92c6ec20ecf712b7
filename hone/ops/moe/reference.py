"""Tokens sorted by expert and back, and one product per expert, in plain torch: the kernels' reference, and the CPU path."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.activation.reference import clamped_swiglu, swiglu
from hone.ops.linear.codes import input_codes
from hone.ops.moe.weights import ExpertWeights, Rounding


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    """`hone.ops.grouped_linear`: one product per span. Rows that are nobody's are 0."""
    experts = weight.unbind()
    made = [
        x.new_zeros(end - begin, weight.shape[1]) if expert is None else x[begin:end] @ experts[expert].T
        for expert, begin, end in _spans(ends, starts, len(x))
    ]
    return torch.cat(made)


def grouped_sums(dy: Tensor, x: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    """The sum over each expert's rows of dy [T, N] times x [T, K]: [E, N, K], the gradient of `grouped_linear` by its weight."""
    made = [dy.new_zeros(dy.shape[1], x.shape[1]) for _ in ends]
    for expert, begin, end in _spans(ends, starts, len(x)):
        if expert is not None:
            made[expert] = made[expert] + dy[begin:end].T @ x[begin:end]
    return torch.stack(made)


def _spans(ends: Tensor, starts: Tensor | None, num_rows: int) -> list[tuple[int | None, int, int]]:
    """(expert, first row, end) of all rows in order, empty spans too; those of no expert are nobody's."""
    if starts is None:
        until = [0, *ends.tolist()]
        known = [(begin, end, expert) for expert, (begin, end) in enumerate(pairwise(until))]
    else:
        each = zip(starts.tolist(), ends.tolist(), strict=True)
        known = [(*span, expert) for expert, own in enumerate(each) for span in zip(*own, strict=True)]
    found: list[tuple[int | None, int, int]] = []
    at = 0
    for begin, end, expert in sorted(known):
        found += [(None, at, begin)] if at < begin else []
        found.append((expert, begin, end))
        at = end
    return [*found, (None, at, num_rows)] if at < num_rows else found


def permute(
    x: Tensor, expert_ids: Tensor, num_experts: int, pieces: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`hone.ops.permute`: a stable sort."""
    flat, top_k = expert_ids.flatten(), expert_ids.shape[1]
    order = flat.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).to(torch.int32)
    place = place.view(-1, top_k).to(torch.int32)
    if pieces is not None:
        place, order = spread(expert_ids, place, ends, *pieces)
    return x[order // top_k], ends, place


def spread(expert_ids: Tensor, place: Tensor, ends: Tensor, num_pieces: int, room: int) -> tuple[Tensor, Tensor]:
    """(place [T, k], order int32 [n * C]) with gaps, of `place` and `ends` without: the rows of piece i, of E / n neighbouring experts, begin
    at i * C. Waits for no device. A place that nobody asked for has entry 0; of rows beyond a piece's room the last place has one."""
    each = len(ends) // num_pieces
    start = F.pad(ends[each - 1 :: each][:-1], (1, 0))
    piece = expert_ids.div(each, rounding_mode="floor").long()
    inside = (place - start[piece]).clamp(max=room - 1)
    place = (inside + piece * room).to(torch.int32)
    entries = torch.arange(place.numel(), dtype=torch.int32, device=place.device)
    order = torch.zeros(num_pieces * room, dtype=torch.int32, device=place.device)
    return place, order.scatter_(0, place.flatten().long(), entries)


def unpermute(y: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
    """`hone.ops.unpermute`, summed in float32 or wider."""
    rows = y[place.flatten().long()].view(*place.shape, y.shape[1])
    wide = rows.to(torch.promote_types(y.dtype, torch.float32))
    return (wide if weights is None else wide * weights[..., None].to(wide.dtype)).sum(1).to(y.dtype)


def choose_experts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    logit_bias: Tensor | None,
    sigmoid: bool,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`hone.ops.choose_experts`, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide), None if logit_bias is None else logit_bias.to(wide))
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    ids = (scores if bias is None else scores + bias).topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return ids.to(torch.int32), (weights * scale).float()


def add_bias(y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """y [T, N], rows sorted by expert, plus their expert's bias [E, N]; rows from ends[-1] on get any. Waits for no device."""
    rows = torch.arange(len(y), device=y.device, dtype=ends.dtype)
    expert = torch.bucketize(rows, ends, right=True).clamp_(max=len(ends) - 1)
    return y + bias.index_select(0, expert)


def gated(gate_up: Tensor, limit: float | None, alpha: float) -> Tensor:
    """SwiGLU, or with `limit` gpt-oss's clamped one: [T, 2 F] -> [T, F]."""
    return swiglu(gate_up) if limit is None else clamped_swiglu(gate_up, limit, alpha)


def rounded(x: Tensor, rounding: Rounding) -> Tensor:
    """x [M, K] rounded to codes with a scale a row, in its own dtype."""
    codes, scales = input_codes(x, rounding)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (codes.to(wide) * scales.to(wide)[:, None]).to(x.dtype)


def expert_swiglu(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeights, down: ExpertWeights, limit: float | None, alpha: float,
    rounding: Rounding | None = None,
) -> Tensor:  # fmt: skip
    """`hone.ops.expert_swiglu`: one expert after another, of which only those with tokens are widened; nobody makes zeros."""
    experts = gate_up.sizes[0]
    rows, ends, place = permute(x if rounding is None else rounded(x, rounding), ids.long(), experts + 1)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    made = []
    for expert, own in enumerate(rows.split(sizes)):
        if expert == experts:
            made.append(torch.zeros_like(own))
        elif len(own):
            first, second = (
                (one.dequantize(x.dtype)[0], None if one.bias is None else one.bias[0].to(x.dtype))
                for one in (gate_up.expert(expert), down.expert(expert))
            )
            inner = gated(F.linear(own, *first), limit, alpha)
            made.append(F.linear(inner if rounding is None else rounded(inner, rounding), *second))
    return unpermute(torch.cat(made) if made else rows, place, weights)


def piece_spans(counts: Tensor, index: int, room: int | None) -> tuple[Tensor, Tensor]:
    """`hone.ops.moe.api.piece_spans`."""
    own = counts.view(len(counts), len(counts), -1)[:, index]
    until = own.cumsum(1)
    if room is None:
        first = F.pad(until[:, -1].cumsum(0), (1, 0))[:-1]
        starts, ends = until - own, until
    else:
        first = torch.arange(0, len(own) * room, room, device=own.device)
        starts, ends = (one.clamp(max=room) for one in (until - own, until))
    return (ends + first[:, None]).T.to(torch.int32), (starts + first[:, None]).T.to(torch.int32)
