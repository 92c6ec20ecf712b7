"""Spherical k-means over unit vectors, and the pairs within a cluster that are nearly parallel."""

from __future__ import annotations

import itertools

import numpy as np

_BLOCK = 4096
"""Rows that are multiplied at once."""


def assign(vectors: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nearest centroid int64 [n], cosine to it float32 [n]) of unit `vectors` (float32 [n, D]); `centroids` are unit too."""
    nearest, similarity = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    for begin in range(0, len(vectors), _BLOCK):
        products = vectors[begin : begin + _BLOCK] @ centroids.T
        here = products.argmax(1)
        nearest[begin : begin + _BLOCK] = here
        similarity[begin : begin + _BLOCK] = products[np.arange(len(here)), here]
    return nearest, similarity


def centroids_of(vectors: np.ndarray, count: int, iterations: int, seed: int) -> np.ndarray:
    """`count` unit centroids (float32 [count, D]) of unit `vectors` (float32 [n, D]) by Lloyd's iterations from random members.

    An empty cluster takes the vector that is farthest from its own centroid.
    """
    random = np.random.RandomState(seed)
    centroids = vectors[np.sort(random.choice(len(vectors), count, replace=False))].copy()
    before: np.ndarray | None = None
    for _ in range(iterations):
        nearest, similarity = assign(vectors, centroids)
        if before is not None and (nearest == before).all():
            break
        before = nearest
        order = np.argsort(nearest, kind="stable")
        borders = np.searchsorted(nearest[order], np.arange(count + 1))
        lost = iter(np.argsort(similarity, kind="stable"))
        for cluster in range(count):
            members = order[borders[cluster] : borders[cluster + 1]]
            total = (
                vectors[members].sum(0, dtype=np.float64) if len(members) else vectors[next(lost)].astype(np.float64)
            )
            norm = np.linalg.norm(total)
            centroids[cluster] = total / norm if norm > 0 else vectors[members[0]]
    return centroids


def prune(vectors: np.ndarray, cluster: np.ndarray, rank: np.ndarray, least: float) -> np.ndarray:
    """For each of the unit `vectors` (float32 [n, D]) the index (int64 [n]) of the one that stands for it; its own when it stays.

    In each `cluster` (int [n]), in order of `rank` (float [n], then of the index), one goes when an earlier one has a cosine above
    `least` with it; the first such one stands for it, or what stands for that.
    """
    stands = np.arange(len(vectors))
    by_cluster = np.lexsort((stands, rank, cluster))
    borders = np.flatnonzero(np.diff(cluster[by_cluster], prepend=-1, append=-1))
    for begin, end in itertools.pairwise(borders):
        members = by_cluster[begin:end]
        held = vectors[members]
        for first in range(0, len(members), _BLOCK):
            rows = held[first : first + _BLOCK]
            near = rows @ held[: first + len(rows)].T > least
            near &= np.arange(first + len(rows))[None] < (first + np.arange(len(rows)))[:, None]
            for row in np.flatnonzero(near.any(1)):
                stands[members[first + row]] = stands[members[near[row].argmax()]]
    return stands
