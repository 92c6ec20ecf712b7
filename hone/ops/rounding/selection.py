"""Selection of the weights that stay, by score: the largest of each row, or of every few neighbours.

Equal scores are resolved by position, so that a mask is the same on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pattern(NamedTuple):
    """N:M sparsity: of every `group` neighbours `stay` remain."""

    stay: int
    group: int


def largest(scores: Tensor, count: int) -> Tensor:
    """Bool [R, L], False for the `count` smallest of each row of `scores` [R, L]; of equal scores the first are False."""
    if not count:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    last = scores.kthvalue(count, dim=1, keepdim=True).values
    tied = scores == last
    spare = count - (scores < last).sum(1, keepdim=True)
    return (scores > last) | (tied & (tied.cumsum(1, dtype=torch.int32) > spare))


def largest_of_group(scores: Tensor, stay: int) -> Tensor:
    """Bool [M, ...], True for the `stay` largest of the M `scores` [M, ...]; of equal scores the last."""
    count = len(scores)
    place = torch.arange(count, device=scores.device)
    later = (place[None, :] > place[:, None]).view(count, count, *[1] * (scores.dim() - 1))
    mine, other = scores[:, None], scores[None, :]
    return ((other > mine) | ((other == mine) & later)).sum(1) < stay
