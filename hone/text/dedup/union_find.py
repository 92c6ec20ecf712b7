"""Union-find over document indices: the connected components, whatever the order of the edges."""

from __future__ import annotations

import numpy as np

from hone.text.compiled import entry

_AHEAD = 64
"""Edges read together before they are joined, so that their memory reads overlap."""


def kind_of(count: int) -> type:
    """The dtype for indices of `count` nodes: int32 where they fit, else int64."""
    return np.int32 if count < 1 << 31 else np.int64


def singles(count: int) -> np.ndarray:
    """Parents of `count` nodes without edges."""
    return np.arange(count, dtype=kind_of(count))


@entry
def link(parents, one, other):
    """Joins the sets of two nodes (Rem's algorithm, which climbs from both at once). A parent's index is never above its child's."""
    up, across = parents[one], parents[other]
    while up != across:
        if up < across:
            one, other = other, one
            up, across = across, up
        parents[one] = across
        if one == up:
            break
        one = up
        up = parents[one]


@entry
def join(parents, ones, others):
    """Joins the sets of ones[i] and others[i] (int [num_edges] each) for all i, in `parents`."""
    seen = np.int64(0)
    for begin in range(0, len(ones), _AHEAD):
        end = min(begin + _AHEAD, len(ones))
        for i in range(begin, end):
            seen += parents[ones[i]] ^ parents[others[i]]
        for i in range(begin, end):
            link(parents, np.int64(ones[i]), np.int64(others[i]))
    return seen  # so that the reads ahead are not optimized away


@entry
def flatten(parents):
    """Replaces every parent by its set's lowest index. Parents come before their children, so one pass is enough."""
    for node in range(len(parents)):
        parents[node] = parents[parents[node]]


@entry
def least_members(roots, letters):
    """Replaces each node's index in `roots` by that of the set's member whose row of `letters` ([n, width], unsigned) is lowest.

    `roots` (int [n]) has equal indices below n for members of a set. Of equal rows, the lower index is taken.
    """
    best = np.full_like(roots, -1)
    for node in range(len(roots)):
        rival = best[roots[node]]
        if rival < 0:
            best[roots[node]] = node
            continue
        for place in range(letters.shape[1]):
            if letters[node, place] != letters[rival, place]:
                if letters[node, place] < letters[rival, place]:
                    best[roots[node]] = node
                break
    for node in range(len(roots)):
        roots[node] = best[roots[node]]


def lowest_ids(groups: np.ndarray, ids: np.ndarray, rank: np.ndarray | None = None) -> np.ndarray:
    """For each document (int [n]) the document of its group with the lowest (rank, id); overwrites `groups` with the result.

    `groups` (int [n], each 0 <= group < n) is equal for documents of one group; `ids` [n] are strings or numbers, ordered
    as Python orders them; `rank` (uint64 [n]), without which ids alone decide. Of equal ones in a group, the lower index is taken.
    """
    letters = _letters(ids)
    if rank is not None:
        high = rank.astype(">u8").view(np.uint8).reshape(len(rank), 8)
        letters = np.hstack([high.astype(letters.dtype), letters])
    least_members(groups, letters)
    return groups


def _letters(ids: np.ndarray) -> np.ndarray:
    """`ids` as unsigned numbers [n, width], whose rows compare lexicographically like the ids."""
    if ids.dtype.kind == "O":
        ids = ids.astype(str)
    ids = np.ascontiguousarray(ids)
    if ids.dtype.kind in "US":
        letter = np.uint32 if ids.dtype.kind == "U" else np.uint8
        return ids.view(letter).reshape(len(ids), -1 if len(ids) else 1)
    assert ids.dtype.kind == "u", f"ids must be strings or unsigned numbers, not {ids.dtype}"
    return ids.reshape(-1, 1)
