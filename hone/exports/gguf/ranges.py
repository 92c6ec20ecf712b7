"""Scales and minima of groups whose codes begin at 0: a search over step sizes, each with its least-squares fit.

Shapes: B blocks, G groups of a block, g weights of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = [-1.0 + 0.1 * step for step in range(21)]
"""Candidates: the range of a group is divided into the number of steps of the code's range plus one of these."""
_LARGEST = 65504.0
ROUNDS = 3
"""Times that the scales of a block are fitted again to the codes that were rounded with them."""


class SuperRanges(NamedTuple):
    """`codes` int16 [B, G, g]; `d`, `m` float16 [B, 1]; `scales`, `minima` int16 [B, G]: d * scale * code - m * minimum."""

    codes: Tensor
    d: Tensor
    m: Tensor
    scales: Tensor
    minima: Tensor


def fit_ranges(groups: Tensor, top: int, importance: Tensor | None, *, below_zero: bool) -> tuple[Tensor, Tensor]:
    """(scale, low) float32 [B, G] so that scale * code + low, codes 0 ... top, is near groups float32 [B, G, g].

    For every candidate step the codes are rounded, and scale and low are the (weighted) least-squares fit to them; the
    best candidate is kept. With `below_zero` no low is above 0. `importance` has the shape of `groups`.
    """
    weight = torch.ones_like(groups) if importance is None else importance
    low = groups.amin(-1)
    low = low.clamp(max=0) if below_zero else low
    span = groups.amax(-1) - low
    best_scale, best_low = (span / top).clamp(min=0), low
    least = _error(groups, best_scale, best_low, top, weight)
    for step in STEPS:
        codes = _codes(groups, span / (top + step), low, top)
        scale, offset = _line(codes, groups, weight, below_zero)
        error = (
            (torch.addcmul(offset.unsqueeze(-1), codes, scale.unsqueeze(-1)) - groups).square_().mul_(weight).sum(-1)
        )
        better = (error < least) & (scale > 0)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, offset, best_low)
        least = torch.where(better, error, least)
    return best_scale, best_low


def fit_scales(groups: Tensor, bits: int, importance: Tensor | None) -> Tensor:
    """Scales float32 [B, G] so that scale * code, signed codes of `bits` bits, is near groups float32 [B, G, g].

    A candidate makes the largest magnitude of a group the lowest code, divided by a number of steps near 2^(bits - 1); its
    sign is that of this value or the opposite. The scale is the (weighted) least-squares fit to the candidate's codes.
    """
    weight = torch.ones_like(groups) if importance is None else importance
    half = 1 << (bits - 1)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best = extreme / -half
    least = torch.full_like(best, torch.inf)
    for sign in (-1.0, 1.0):
        for step in STEPS:
            codes = divide(groups, (extreme * (sign / (half + step))).unsqueeze(-1)).round_().clamp_(-half, half - 1)
            weighed = codes * weight
            scale = divide((weighed * groups).sum(-1), (weighed * codes).sum(-1))
            error = (codes * scale.unsqueeze(-1) - groups).square_().mul_(weight).sum(-1)
            better = error < least
            best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def fit_super_ranges(groups: Tensor, top: int, top_scale: int, importance: Tensor | None) -> SuperRanges:
    """`fit_ranges`, with scales and minima as integers 0 ... top_scale times two float16 numbers of the block.

    After rounding, these two are fitted by least squares to the codes and the codes rounded again, `ROUNDS` times; the
    best is kept for each block.
    """
    weight = torch.ones_like(groups) if importance is None else importance
    scale, low = fit_ranges(groups, top, importance, below_zero=True)
    d, m = half(scale.amax(1, keepdim=True) / top_scale), half(-low.amin(1, keepdim=True) / top_scale)
    scales = divide(scale, d.float()).round_().clamp_(0, top_scale)
    minima = divide(-low, m.float()).round_().clamp_(0, top_scale)
    best_d, best_m, least = d, m, torch.full_like(scale[:, :1], torch.inf)
    for _ in range(ROUNDS + 1):
        codes = _codes(groups, d.float() * scales, -m.float() * minima, top)
        back = codes * (d.float() * scales).unsqueeze(-1) - (m.float() * minima).unsqueeze(-1)
        error = (back - groups).square_().mul_(weight).sum((1, 2)).unsqueeze(1)
        better = error < least
        best_d, best_m = torch.where(better, d, best_d), torch.where(better, m, best_m)
        least = torch.where(better, error, least)
        d, m = _refitted(codes * scales.unsqueeze(-1), minima.unsqueeze(-1), groups, weight, (best_d, best_m))
    codes = _codes(groups, best_d.float() * scales, -best_m.float() * minima, top)
    return SuperRanges(codes.to(torch.int16), best_d, best_m, scales.to(torch.int16), minima.to(torch.int16))


def _line(codes: Tensor, groups: Tensor, weight: Tensor, below_zero: bool) -> tuple[Tensor, Tensor]:
    """The weighted least-squares line through (code, value) of each group: (scale, offset) [B, G]."""
    weighed = codes * weight
    total, first, second = weight.sum(-1), weighed.sum(-1), (weighed * codes).sum(-1)
    values, product = (weight * groups).sum(-1), (weighed * groups).sum(-1)
    scale = divide(total * product - first * values, total * second - first * first)
    offset = divide(values - scale * first, total)
    if below_zero:
        above = offset > 0
        scale, offset = torch.where(above, divide(product, second), scale), offset.clamp(max=0)
    return scale, offset


def _refitted(
    scaled: Tensor, minima: Tensor, groups: Tensor, weight: Tensor, otherwise: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(d, m) float16 [B, 1] of least squares for d * scaled - m * minima; `otherwise` where they would not be positive."""

    def summed(values: Tensor) -> Tensor:
        return (values * weight).sum((1, 2)).unsqueeze(1)

    a, b, c = summed(scaled * scaled), summed(scaled * minima), summed((minima * minima).expand_as(groups))
    x, y = summed(scaled * groups), summed(minima * groups)
    determinant = a * c - b * b
    d, m = divide(c * x - b * y, determinant), divide(b * x - a * y, determinant)
    good = (determinant > 1e-6 * a * c) & (d > 0) & (m >= 0)
    return torch.where(good, half(d), otherwise[0]), torch.where(good, half(m), otherwise[1])


def _error(groups: Tensor, scale: Tensor, low: Tensor, top: int, weight: Tensor) -> Tensor:
    back = torch.addcmul(low.unsqueeze(-1), _codes(groups, scale, low, top), scale.unsqueeze(-1))
    return (back - groups).square_().mul_(weight).sum(-1)


def _codes(groups: Tensor, scale: Tensor, low: Tensor, top: int) -> Tensor:
    """Codes 0 ... top as floats [B, G, g] nearest to `groups`."""
    return divide(groups - low.unsqueeze(-1), scale.unsqueeze(-1)).round_().clamp_(0, top)


def divide(values: Tensor, by: Tensor) -> Tensor:
    """values / by, 0 where `by` is 0."""
    return values / torch.where(by == 0, torch.inf, by)


def half(values: Tensor) -> Tensor:
    """float16, the largest finite number in place of infinity."""
    return values.clamp(-_LARGEST, _LARGEST).to(torch.float16)
