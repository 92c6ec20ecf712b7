"""Who mixes weights with whom: for gossip rows of doubly stochastic matrices, so that the mean of all weights stays; for pairs bipartite graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Mixed(NamedTuple):
    """A rank's row of a step's matrix."""

    sources: Mapping[int, float]
    """The ranks whose weights it gets, with their shares of its own next ones; the rest is the share of its weights."""
    targets: tuple[int, ...]
    """The ranks that get its weights."""


def ring(step: int, rank: int, size: int) -> Mixed:
    """Both neighbours of a ring, a third each, in every step (Lian et al. 2017, section 6); of two ranks the other one, a half."""
    peers = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return Mixed(dict.fromkeys(peers, 1 / (1 + len(peers))), tuple(peers))


def exponential(step: int, rank: int, size: int) -> Mixed:
    """In step t the half of the rank 2^(t mod ceil(log2 n)) before it: of a power of two ranks all are averaged in log2 n steps.

    The one-peer exponential graph of Assran et al. 2018, arXiv:1811.10792, and Ying et al. 2021, arXiv:2110.13363.
    """
    if size == 1:
        return Mixed({}, ())
    hop = 1 << step % (size - 1).bit_length()
    return Mixed({(rank - hop) % size: 0.5}, ((rank + hop) % size,))


def ring_of_two_sides(rank: int, size: int) -> tuple[int, ...]:
    """The neighbours of a ring that are on the other side of even and odd ranks; of an odd number of ranks 0 and the last are none."""
    return tuple(sorted({(rank - 1) % size, (rank + 1) % size} & set(every_other(rank, size))))


def every_other(rank: int, size: int) -> tuple[int, ...]:
    """All ranks of the other side, of even and odd ranks: the complete bipartite graph."""
    return tuple(range(1 - rank % 2, size, 2))
