"""Collectives with a root over a binomial tree: in each step the number of ranks that take part doubles.

Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", section 3. With n ranks,
L = ceil(log2(n)), a message of B bytes (scatter, gather: of all ranks together), `alpha` seconds a message, `beta` a byte:

    broadcast, reduce   L alpha + L B beta
    scatter, gather     L alpha + (n - 1) / n B beta
    all_reduce          reduce, then broadcast: 2 L alpha + 2 L B beta

Rank r counts from the root; its parent is r without its lowest set bit, and the ranks r to r + lowest bit are its branch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.parallel.axis import Axis


def broadcast(axis: Axis, x: Tensor, root: int = 0) -> Tensor:
    """x becomes the root's x."""
    parent, children = _family(axis, root)
    if parent is not None:
        axis.exchange(None, None, parent, x)
    for child, _ in reversed(children):  # the largest branch first: it has the longest way
        axis.exchange(child, x, None, None)
    return x


def reduce(axis: Axis, x: Tensor, root: int = 0) -> Tensor:
    """The root's x becomes the sum of every rank's x; on others it holds the sum of their branch."""
    parent, children = _family(axis, root)
    for child, _ in children:
        found = torch.empty_like(x)
        axis.exchange(None, None, child, found)
        x.add_(found)
    if parent is not None:
        axis.exchange(parent, x, None, None)
    return x


def all_reduce(axis: Axis, x: Tensor) -> Tensor:
    """x becomes the sum of every rank's x, the same bits on all."""
    return broadcast(axis, reduce(axis, x))


def scatter(axis: Axis, x: Tensor | None, part: Tensor, root: int = 0) -> Tensor:
    """`part` [N] becomes row `axis.index` of the root's x [n, N]; other ranks give None."""
    parent, children = _family(axis, root)
    branch = part.new_empty(_branch_size(axis, root), *part.shape)
    if parent is None:
        assert x is not None, "the root scatters nothing"
        branch.copy_(x.roll(-root, 0))
    else:
        axis.exchange(None, None, parent, branch)
    for child, at in reversed(children):
        axis.exchange(child, branch[at : 2 * at], None, None)
    return part.copy_(branch[0])


def gather(axis: Axis, part: Tensor, root: int = 0) -> Tensor | None:
    """Every rank's `part` [N] in the order of the ranks, [n, N], on the root; None elsewhere."""
    parent, children = _family(axis, root)
    branch = part.new_empty(_branch_size(axis, root), *part.shape)
    branch[0] = part
    for child, at in children:
        axis.exchange(None, None, child, branch[at : 2 * at])
    if parent is not None:
        axis.exchange(parent, branch, None, None)
        return None
    return branch.roll(root, 0)


def _family(axis: Axis, root: int) -> tuple[int | None, list[tuple[int, int]]]:
    """(parent, [(child, how far behind this rank)]), nearest child first, as indices of the axis."""
    mine, n = (axis.index - root) % axis.size, axis.size
    children, bit = [], 1
    while bit < n and not mine & bit:
        if mine + bit < n:
            children.append(((mine + bit + root) % n, bit))
        bit *= 2
    return (None if mine == 0 else (mine - bit + root) % n), children


def _branch_size(axis: Axis, root: int) -> int:
    """Ranks in the branch of this one, itself included."""
    mine = (axis.index - root) % axis.size
    return axis.size if mine == 0 else min(mine & -mine, axis.size - mine)
