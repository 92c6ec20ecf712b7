"""What a mixer is told when serving: flat tokens of many rows, keys and values in the pages of a `KVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.model.context import Context
from hone.ops import rope_write
from hone.ops.dispatch import choose, locate
from hone.ops.paged.api import PagedPlan, attend_paged, attend_planned, plan_rows, runs_kernel, write_kv
from hone.serve.pages import NULL_PAGE, KVCache


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
        super().__init__()
        self.cache = cache
        size = cache.page_size
        ends = [start + length for start, length in zip(starts, lengths)]
        self._longest = max(ends)
        widest = -(-self._longest // size)
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
        self.positions, self._pages, self._offsets = _sent(both, device)
        self._rows = table, ends, lengths
        self._most = max(lengths)
        self._plan: PagedPlan | None = None
        if torch.device(device).type == "cuda":
            flat = np.concatenate((ends, lengths, table.ravel())).astype(np.int32)
            self._ends, self._lengths, pages_flat = _sent(flat, device).split([len(ends), len(ends), table.size])
            self._table = pages_flat.view(table.shape)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *, scale: float, window: int | None
    ) -> Tensor:
        k_pages, v_pages = self.cache.k[layer], self.cache.v[layer]
        if k is not None and v is not None:  # else borrowed from `layer`, which has written them
            write_kv(k, v, k_pages, v_pages, self._pages, self._offsets)
        if q.is_cuda and runs_kernel(q, k_pages, v_pages, len(self._ends)):
            lengths = None if self._most == 1 else self._lengths
            return attend_paged(
                q, k_pages, v_pages, self._table, self._ends, lengths, scale=scale, window=window, max_query_len=self._most
            )  # fmt: skip
        if self._plan is None:
            self._plan = plan_rows(*self._rows, self.cache.page_size, q.device)
        return attend_planned(q, k_pages, v_pages, self._plan, scale=scale, window=window)

    def turn_and_file(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> bool:
        k_pages, v_pages = self.cache.k[layer], self.cache.v[layer]
        if not q.is_cuda or not runs_kernel(q, k_pages, v_pages, len(self._ends)):
            return False
        rope_write(q, k, v, cos, sin, k_pages, v_pages, self._pages, self._offsets)
        return True

    def rotary(self, rope: Any, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Context.rotary`, out of a table that the cache keeps: a decode step is too short to make angles anew."""
        key = (rope.key, head_dim, dtype)
        if key not in self._rotary:
            table = self.cache.tables.get(key)
            if table is None or table[0].shape[0] < self._longest:
                places = torch.arange(1 << (self._longest - 1).bit_length(), device=self.positions.device)
                angles = places[:, None].float() * rope.frequencies(head_dim, places.device)
                table = angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)
                self.cache.tables[key] = table
            self._rotary[key] = table[0][self.positions], table[1][self.positions]
        return self._rotary[key]


class PagedBuffers(Paged):
    """What a captured pass of `num_rows` rows of one new token each reads: tensors that stay where they are.

    A row that only pads has length 0; its keys go to the null page, which the kernels never read.
    """

    def __init__(self, cache: KVCache, num_rows: int, longest: int, device: torch.device) -> None:
        Context.__init__(self)
        self.cache = cache
        self._longest, self._most = longest, 1
        self._host = torch.zeros(5, num_rows, dtype=torch.int64).pin_memory()
        self._device = self._host.to(device)
        self.tokens, self.positions, self._pages, self._offsets, self._ends = self._device
        self._table = torch.zeros(num_rows, -(-longest // cache.page_size), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event()
        self._places = np.zeros(self._table.shape, dtype=np.int32)  # the host's table
        self._known: list[tuple[Sequence[int], int]] = [((), 0)] * num_rows  # what it holds: pages, how many of them

    def forget(self) -> None:
        """Drops what a pass has derived from the buffers, so that the next one derives it again."""
        self._rotary.clear()

    def fill(self, tokens: Sequence[int], starts: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Brings a step's rows to the device."""
        self._copied.synchronize()  # the host's side must not change under the last copy
        size, count = self.cache.page_size, len(tokens)
        changed = False
        for row, (ids, start) in enumerate(zip(pages, starts)):
            used, (known, num_known) = start // size + 1, self._known[row]
            if known is not ids or num_known != used:  # a row's list only ever grows
                self._places[row, :used] = ids[:used]
                self._known[row] = ids, used
                changed = True
        flat, positions = self._host.numpy(), np.array(starts, dtype=np.int64)
        flat[:, count:] = NULL_PAGE  # and position, offset and length 0
        flat[0, :count], flat[1, :count], flat[4, :count] = tokens, positions, positions + 1
        flat[2, :count], flat[3, :count] = self._places[np.arange(count), positions // size], positions % size
        self._device.copy_(self._host, non_blocking=True)
        if changed:
            table = self._places[:count, : max(starts) // size + 1].copy()
            self._table[:count, : table.shape[1]].copy_(_sent(table, self._table.device))
        self._copied.record()


def reads_in_place(cache: KVCache, device: torch.device | str) -> bool:
    """Whether attention over every layer of `cache` runs without the host knowing lengths, as a captured graph needs."""
    if torch.device(device).type != "cuda":
        return False
    return all(
        choose(
            "attend_paged",
            locate(device),
            dtype=k.dtype,
            page_dtype=k.dtype,
            head_dim=k.shape[-1],
            v_dim=v.shape[-1],
            rows=1,
        ).backend
        == "triton"
        for k, v in zip(cache.k, cache.v)
    )


def _sent(values: np.ndarray, device: torch.device | str) -> Tensor:
    """`values` on the device; a GPU takes them from pinned memory, so that the host need not wait."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
