"""All-reduce in a logarithmic number of steps: ranks exchange with partners at distances n / 2, n / 4, ..., 1.

Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", sections 4.2 and 4.5. With
p the largest power of two up to n ranks, a message of B bytes, `alpha` seconds a message, `beta` seconds a byte:

    halving    2 log2(p) alpha + 2 (p - 1) / p B beta      half of the rest a step, there and back: large messages
    doubling   log2(p) alpha + log2(p) B beta              the whole message a step: small ones

Where n is no power of two the other n - p ranks give their values to one of the p first and get the sum last: 2 alpha + 2 B beta more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hone.parallel.axis import Axis


def all_reduce(axis: Axis, x: Tensor) -> Tensor:
    """x [N] becomes the sum of every rank's x, the same bits on all: recursive halving, then doubling."""
    return _among_a_power_of_two(axis, x, _halve_and_double)


def doubling(axis: Axis, x: Tensor) -> Tensor:
    """x [N] becomes the sum of every rank's x, the same bits on all: partners exchange all they have."""
    return _among_a_power_of_two(axis, x, _double)


def _among_a_power_of_two(axis: Axis, x: Tensor, combine: Callable[[Axis, Tensor, int], None]) -> Tensor:
    """Sums over the first p ranks by `combine`; rank p + i adds its values to rank i's before, and gets the sum after."""
    power = 1 << axis.size.bit_length() - 1
    extra, me = axis.size - power, axis.index
    if me >= power:
        axis.exchange(me - power, x, None, None)
        axis.exchange(None, None, me - power, x)
        return x
    if me < extra:
        found = torch.empty_like(x)
        axis.exchange(None, None, me + power, found)
        x.add_(found)
    combine(axis, x, power)
    if me < extra:
        axis.exchange(me + power, x, None, None)
    return x


def _halve_and_double(axis: Axis, x: Tensor, power: int) -> None:
    spans, mine = [], x
    distance = power // 2
    while distance:  # of what both have, each partner sums one half
        partner, (low, high) = axis.index ^ distance, mine.tensor_split(2)
        kept, given = (high, low) if axis.index & distance else (low, high)
        found = torch.empty_like(kept)
        axis.exchange(partner, given, partner, found)
        spans.append((partner, kept, given))
        mine = kept.add_(found)
        distance //= 2
    for partner, kept, given in reversed(spans):  # back: each gets the half that the other has summed
        axis.exchange(partner, kept, partner, given)


def _double(axis: Axis, x: Tensor, power: int) -> None:
    distance, found = 1, torch.empty_like(x)
    while distance < power:
        partner = axis.index ^ distance
        axis.exchange(partner, x, partner, found)
        x.add_(found)  # a + b on one side is b + a on the other: the same bits
        distance *= 2
