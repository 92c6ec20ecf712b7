"""Sampling in plain torch: filters, and a draw by Gumbel-max; the kernels' reference, and the CPU path.

Legend: E entries (one per token to draw), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.ops.sample.noise import gumbel, token_hashes


def sample(
    logits: Tensor, temperatures: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor, keys: Tensor, filtered: bool
) -> Tensor:
    """`hone.ops.sample` with one option per entry in tensors [E]: temperature, top-k, top-p, log of min-p."""
    logits = logits.float()
    drawing = temperatures != 0
    scaled = logits / torch.where(drawing, temperatures, 1.0)[:, None]
    if filtered:
        scaled = _filtered(scaled, counts, shares, cuts)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(drawing, (scaled + gumbel(keys, token_hashes(tokens))).argmax(-1), logits.argmax(-1))


def filter_logits(
    logits: Tensor,
    temperatures: Sequence[float],
    min_ps: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
) -> Tensor:
    """Logits [E, V] / temperature, -inf where min-p, top-k (0: all) or top-p drop the token. Temperatures must not be 0."""
    if any(one != 1 for one in temperatures):
        logits = logits / _numbers(temperatures, logits)
    if any(one > 0 for one in min_ps):
        cuts = _numbers([math.log(one) if one > 0 else -math.inf for one in min_ps], logits)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + cuts, -math.inf)
    vocab_size = logits.shape[-1]
    counts = [min(one or vocab_size, vocab_size) for one in top_ks]
    if any(one < 1 for one in top_ps):
        return _top_p(logits, _numbers(counts, logits), _numbers(top_ps, logits))
    if min(counts) < vocab_size:
        best = logits.topk(max(count for count in counts if count < vocab_size)).values
        places = torch.tensor([min(count, best.shape[-1]) - 1 for count in counts], device=logits.device)
        floor = best.gather(-1, places[:, None])
        floor = floor.masked_fill(_numbers(counts, logits) >= vocab_size, -math.inf)
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def _top_p(logits: Tensor, counts: Tensor, shares: Tensor) -> Tensor:
    """-inf where a value is not among the `counts` [E, 1] largest or beyond `shares` [E, 1] of their mass."""
    ordered = logits.sort(-1, descending=True).values
    places = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(places >= counts, -math.inf)
    mass = ordered.softmax(-1)
    # A row without top-p must not lose its rarest tokens to rounding because another row uses top-p.
    kept = mass.cumsum(-1) - mass < shares.masked_fill(shares >= 1, 2.0)
    last = (kept & (ordered > -math.inf)).sum(-1, keepdim=True).clamp(min=1) - 1
    return logits.masked_fill(logits < ordered.gather(-1, last), -math.inf)


def _filtered(scaled: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor) -> Tensor:
    """`filter_logits` after the temperature, with options on the device."""
    scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + cuts[:, None], -math.inf)
    return _top_p(scaled, counts[:, None], shares[:, None])


def _numbers(values: Sequence[float], logits: Tensor) -> Tensor:
    return torch.tensor(values, device=logits.device)[:, None]
