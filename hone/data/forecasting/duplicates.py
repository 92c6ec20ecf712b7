"""Duplicates: estimates how many copies the documents of a sample have outside of it, and what deduplication leaves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_KNOWN = 8
"""From this many copies in the sample on, the number in the input is estimated as copies / share."""
_LEAST_SEEN = 30
"""If all documents had one copy, a sample must be expected to contain this many pairs, or it says nothing about duplicates."""


class Copies(NamedTuple):
    """`weights` (float [n]): the part left of each document; `doubt` the standard error of the mean of what is left.

    `unseen`: the sample is too small a share of the corpus, and what is left is only bounded by this from above.
    """

    weights: np.ndarray
    doubt: float
    unseen: bool


def left(clusters: np.ndarray, pieces: np.ndarray, share: float) -> Copies:
    """What deduplication leaves, where documents of one cluster (int [n]) are copies and are in `pieces` (int [n]) of the input,
    of which a fraction `share` is sampled.

    Copies within a piece are all seen: one of them counts. Copies in other pieces are each seen with probability
    `share`. If a document is in m pieces of the input and is seen in j of those sampled, then for a sampled one
    E[j - 1] = share E[m - 1] and E[(j - 1)(j - 2)] = share^2 E[(m - 1)(m - 2)], whatever the distribution of m (factorial
    moments of a thinned count). What is left is E[1/m]; of all distributions with these two moments, the one of m = 1 and a
    single larger m has the highest (Krein and Nudelman 1977: 1/m has a negative third derivative), and is used.
    """
    order = np.lexsort((np.arange(len(clusters)), pieces, clusters))
    one, two = clusters[order], pieces[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (one[1:] != one[:-1]) | (two[1:] != two[:-1])
    firsts = order[fresh]
    _, inverse, counts = np.unique(clusters[firsts], return_inverse=True, return_counts=True)
    seen = counts[inverse].astype(float)
    weights = np.zeros(len(clusters))
    if share >= 1:
        weights[firsts] = 1 / seen
        return Copies(weights, 0.0, False)
    often = seen >= _KNOWN
    rare = seen[~often]
    found = np.where(often, np.minimum(share / seen, 1.0), 1.0)
    doubt = 0.0
    if len(rare):
        more = (rare - 1).mean() / share
        most = 2 + ((rare - 1) * (rare - 2)).mean() / share**2 / more if more else 2.0
        copied = min(more / (most - 1), 1.0)
        # For documents seen once: the probability that they have copies that were not sampled.
        hidden = copied * (1 - share) ** (most - 1)
        hidden /= hidden + 1 - copied if hidden + 1 - copied > 0 else 1.0
        found[~often] = np.where(rare > 1, 1 / np.maximum(most, rare), 1 - hidden * (1 - 1 / most))
        pairs = (rare - 1).sum() / 2
        doubt = (more / most) * np.sqrt((1 - share) / pairs) if pairs else (1 - share) / (2 * share * len(rare))
    weights[firsts] = found
    return Copies(weights, float(doubt), len(firsts) * share / (1 - share) < _LEAST_SEEN)
