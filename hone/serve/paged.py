"""What a mixer is told when serving: flat tokens of many rows, keys and values in the pages of a `KVCache`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.model.context import Context
from hone.ops.paged import attend_planned, plan_rows, write_kv
from hone.serve.pages import KVCache


class Paged(Context):
    """One forward pass over T new tokens, the rows' tokens one after another.

    Row r has `starts[r]` tokens in the cache already and brings `lengths[r]` new ones; `pages[r]` are its pages, enough
    for both. The new tokens' keys and values are written before anyone attends.
    """

    def __init__(
        self,
        cache: KVCache,
        pages: Sequence[Sequence[int]],
        starts: Sequence[int],
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.cache = cache
        size = cache.page_size
        ends = [start + length for start, length in zip(starts, lengths)]
        widest = max(-(-end // size) for end in ends)
        table = np.zeros((len(pages), widest), dtype=np.int64)
        for row, (ids, end) in enumerate(zip(pages, ends)):
            used = -(-end // size)
            table[row, :used] = ids[:used]
        if len(lengths) == sum(lengths):
            positions, rows = np.array(starts, dtype=np.int64), np.arange(len(lengths))
        else:
            positions = np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in zip(starts, ends)])
            rows = np.repeat(np.arange(len(lengths)), lengths)
        both = np.stack((positions, table[rows, positions // size], positions % size))
        self.positions, self._pages, self._offsets = torch.from_numpy(both).to(device)
        self._plan = plan_rows(table, ends, lengths, size, device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        k_pages, v_pages = self.cache.k[layer], self.cache.v[layer]
        write_kv(k, v, k_pages, v_pages, self._pages, self._offsets)
        return attend_planned(q, k_pages, v_pages, self._plan, scale=scale, window=window)
