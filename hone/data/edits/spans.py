"""Kernels of edits: bytes cut out of a batch, and spans brought to the borders of characters and words."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def without(
    data: np.ndarray,
    offsets: np.ndarray,
    documents: np.ndarray,
    cut: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(data, offsets) of the texts without the spans [start, end) of documents `cut` (int64 [k], sorted)."""
    total = offsets[-1] - offsets[0]
    out = np.empty(total, np.uint8)
    places = np.zeros(len(offsets), np.int64)
    here = 0
    num_cuts = len(cut)
    j = 0
    for i in range(len(documents)):
        base, size = offsets[i], offsets[i + 1] - offsets[i]
        while j < num_cuts and cut[j] < documents[i]:
            j += 1
        done = 0
        while j < num_cuts and cut[j] == documents[i]:
            stop = min(start[j], size)
            for at in range(done, stop):
                out[here] = data[base + at]
                here += 1
            done = min(max(end[j], done), size)
            j += 1
        for at in range(done, size):
            out[here] = data[base + at]
            here += 1
        places[i + 1] = here
    return out[:here].copy(), places
