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
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    min_ps: Tensor | None,
    keys: Tensor,
    several: int = 1,
) -> tuple[Tensor, Tensor]:
    """`hone.ops.sample` with `peaks`: one option per entry in tensors [E], None where no entry has it."""
    logits = logits.float()
    drawing = temperatures != 0
    scaled = logits * reciprocals(torch.where(drawing, temperatures, 1.0))[:, None]
    if min_ps is not None:
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + min_ps.log()[:, None], -math.inf)
    if top_ks is not None or top_ps is not None:
        vocab_size = logits.shape[1]
        counts = torch.full_like(keys, vocab_size) if top_ks is None else top_ks
        counts = torch.where(counts == 0, vocab_size, counts)
        shares = torch.ones_like(temperatures) if top_ps is None else top_ps
        scaled = _top_p(scaled, counts[:, None], shares[:, None])
    noise = gumbel(keys, token_hashes(torch.arange(logits.shape[1], device=logits.device)))
    best = logits.max(-1)
    if several == 1:
        return torch.where(drawing, (scaled + noise).argmax(-1), best.indices), best.values
    scores = torch.where(drawing[:, None], scaled + noise, logits)
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :several], best.values


def reciprocals(temperatures: Tensor) -> Tensor:
    """What logits are multiplied with for temperatures float32: finite, so that no logit of 0 becomes NaN."""
    return temperatures.reciprocal().clamp(max=torch.finfo(torch.float32).max)


def filter_logits(
    logits: Tensor,
    temperatures: Sequence[float],
    min_ps: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
) -> Tensor:
    """Logits [E, V] times 1 / temperature, -inf where min-p, top-k (0: all) or top-p drop the token. Temperatures must not be 0."""
    if any(one != 1 for one in temperatures):
        logits = logits * reciprocals(_numbers(temperatures, logits))
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


def _numbers(values: Sequence[float], logits: Tensor) -> Tensor:
    return torch.tensor(values, device=logits.device)[:, None]


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """`hone.ops.apply_token_bitmask`: in place, -inf where the bit of a token is not set."""
    places = (rows >= 0).nonzero()[:, 0]
    bits = (torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device)) & 1
    of_byte = (bits == 0).view(torch.int64).flatten()  # eight bools in one number: a lookup for each byte of a mask
    octets = bitmask[rows[places]].view(torch.uint8).int()
    dropped = of_byte[octets.flatten()].view(torch.bool).view(len(places), 32 * bitmask.shape[1])[:, : logits.shape[1]]
    if len(places) == len(logits):
        logits.masked_fill_(dropped, -math.inf)
    else:
        logits[places] = logits[places].masked_fill_(dropped, -math.inf)
