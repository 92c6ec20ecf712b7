"""Ring collectives: every rank sends to the next one only, a slice at a time, so that no link carries more than another.

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". With n ranks, a message of
B bytes, `alpha` seconds a message and `beta` seconds a byte (`hone.cost.ranks`):

    reduce_scatter, all_gather   (n - 1) alpha + (n - 1) / n B beta      each
    all_reduce                   both: 2 (n - 1) alpha + 2 (n - 1) / n B beta

No algorithm moves fewer bytes a rank; the n - 1 steps make it slow for small messages on many ranks (see `halving`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.parallel.axis import Axis


def all_reduce(axis: Axis, x: Tensor) -> Tensor:
    """x [N] becomes the sum of every rank's x, the same bits on all."""
    return all_gather(axis, reduce_scatter(axis, x))


def reduce_scatter(axis: Axis, x: Tensor) -> Tensor:
    """Slice `axis.index` of x [N] becomes that of the sum of every rank's x; other slices hold partial sums. Returns x.

    Slices are those of `tensor_split`: N need not be a multiple of the ranks. Slice c starts at rank c + 1 and collects each
    rank's values on its way around to rank c.
    """
    slices, me, n = x.tensor_split(axis.size), axis.index, axis.size
    for step in range(n - 1):
        leaving, arriving = slices[(me - 1 - step) % n], slices[(me - 2 - step) % n]
        found = torch.empty_like(arriving)
        axis.exchange((me + 1) % n, leaving, (me - 1) % n, found)
        arriving.add_(found)
    return x


def all_gather(axis: Axis, x: Tensor) -> Tensor:
    """x [N], of which this rank has slice `axis.index`, gets every other slice from the rank that has it."""
    slices, me, n = x.tensor_split(axis.size), axis.index, axis.size
    for step in range(n - 1):
        axis.exchange((me + 1) % n, slices[(me - step) % n], (me - 1) % n, slices[(me - 1 - step) % n])
    return x
