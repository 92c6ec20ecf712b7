"""The magnitude below which a fraction of all weights of a model lies, without holding them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Threshold(NamedTuple):
    """The largest magnitude that goes, and the share that goes of the weights of that magnitude."""

    magnitude: float
    tied: float

    def above(self, sizes: Tensor) -> Tensor:
        """Bool [N, K]: whether a weight of magnitude `sizes` float32 [N, K] stays; of tied ones the first go."""
        tied = sizes == self.magnitude
        gone = round(self.tied * int(tied.sum()))
        stays = tied.flatten().cumsum(0, dtype=torch.int32).view(sizes.shape) > gone
        return (sizes > self.magnitude) | (tied & stays)


def smallest(weights: Callable[[], Iterator[Tensor]], fraction: float) -> Threshold:
    """The threshold of the smallest `fraction` of all weights, which each call of `weights` reads again, matrix by matrix.

    Exact: the bits of a positive float32 order like its value, so two counts of 16 bits each find it.
    """
    upper = _count((bits >> 16 for bits in map(_bits, weights())), 1 << 15)
    gone = round(fraction * int(upper.sum()))
    if not gone:
        return Threshold(0.0, 0.0)
    first, gone = _reach(upper, gone)
    lower = _count((bits[bits >> 16 == first] & 0xFFFF for bits in map(_bits, weights())), 1 << 16)
    last, gone = _reach(lower, gone)
    found = torch.tensor(first << 16 | last, dtype=torch.int32).view(torch.float32)
    return Threshold(float(found), gone / int(lower[last]))


def _bits(weight: Tensor) -> Tensor:
    """The bits of the magnitudes of `weight` in float32, flat int32."""
    return weight.to(torch.float32).abs().view(torch.int32).flatten()


def _count(values: Iterator[Tensor], length: int) -> Tensor:
    """How often each of 0 .. length - 1 occurs, int64 [length] on the CPU."""
    total = torch.zeros(length, dtype=torch.int64)
    for one in values:
        total += torch.bincount(one, minlength=length).cpu()
    return total


def _reach(counts: Tensor, wanted: int) -> tuple[int, int]:
    """The value at which `counts`, summed in order, reach `wanted`, and how many of that value are wanted."""
    sums = counts.cumsum(0)
    place = int(torch.searchsorted(sums, wanted))
    return place, wanted - int(sums[place] - counts[place])
