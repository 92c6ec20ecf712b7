"""Which sequences of a step share their first pages, so that attention reads those pages once for all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SharedPages(NamedTuple):
    """Sequences begin ... end - 1 begin with the same `pages` whole pages; (0, 0, 0): none do."""

    begin: int = 0
    end: int = 0
    pages: int = 0

    def pays(self, ends: np.ndarray, block_size: int) -> bool:
        """Whether reading them once leaves out at least half of the keys that `ends` [S] tokens have."""
        return 2 * (self.end - self.begin - 1) * self.pages * block_size >= int(ends.sum()) > 0


NONE_SHARED = SharedPages()


def shared_pages(table: np.ndarray, ends: np.ndarray, block_size: int) -> SharedPages:
    """The longest run of neighbouring sequences with the same first page, and the whole pages that all of them share.

    `table` int32 [S, P] are the pages of sequences with `ends` [S] tokens in the cache, the new ones included.
    """
    if not table.size:
        return NONE_SHARED
    first = table[:, 0]
    starts = np.flatnonzero(np.concatenate(([True], first[1:] != first[:-1])))
    lengths = np.diff(np.append(starts, len(first)))
    longest = int(lengths.argmax())
    begin, end = int(starts[longest]), int(starts[longest] + lengths[longest])
    if end - begin < 2:
        return NONE_SHARED
    most = (int(ends[begin:end].min()) - 1) // block_size  # the new token's page is not shared
    differ = np.flatnonzero((table[begin + 1 : end, :most] != table[begin, :most]).any(0))
    pages = int(differ[0]) if len(differ) else most
    return SharedPages(begin, end, pages) if pages else NONE_SHARED
