"""The context of a serving pass: flat tokens of many sequences, their cache tensors in the pages of a `KVCache`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.model.context import Context
from hone.ops import rope_write
from hone.ops.dispatch import choose, locate
from hone.ops.paged.api import (
    PagedPlan,
    attend_latent,
    attend_paged,
    attend_planned,
    plan_sequences,
    runs_kernel,
    write_kv,
)
from hone.ops.paged.reference import Extras
from hone.serve.paging.cache import KVCache
from hone.serve.step import NULL_PAGE, Batch, layout


class Paged(Context):
    """One forward pass over the T tokens of a `Batch`; their keys and values are written before attention reads them."""

    cached = True

    def __init__(self, cache: KVCache, batch: Batch, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.cache = cache
        self.rope_len = cache.rope_len
        self._batch = batch
        self._longest = int(batch.ends.max())
        self._most = int(batch.lengths.max())
        self._plan: PagedPlan | None = None
        on = placed(batch, device)
        self.tokens, self.positions = on["tokens"], on["positions"]
        self._pages, self._offsets = on["pages"], on["offsets"]
        self._ends, self._lengths, self._table = on["ends"], on["lengths"], on["table"]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        k_pages, v_pages = self._kv(layer)
        if k is not None and v is not None:  # else borrowed from `layer`, which has written them
            write_kv(k.to(k_pages.dtype), v.to(v_pages.dtype), k_pages, v_pages, self._pages, self._offsets)
        if softcap is not None:
            if q.is_cuda:
                runs_kernel(q, k_pages, v_pages, len(self._ends), softcap=True)  # says once that it does not, and why
            extras = Extras(softcap=softcap)
            return attend_planned(q, k_pages, v_pages, self._planned(q), scale=scale, window=window, extras=extras)
        if q.is_cuda and runs_kernel(q, k_pages, v_pages, len(self._ends)):
            lengths = None if self._most == 1 else self._lengths
            return attend_paged(
                q, k_pages, v_pages, self._table, self._ends, lengths, scale=scale, window=window, max_query_len=self._most
            )  # fmt: skip
        return attend_planned(q, k_pages, v_pages, self._planned(q), scale=scale, window=window)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, *, value_dim: int, scale: float) -> Tensor:
        pages = self.cache.layers[layer]["latent"]
        pages[self._pages, self._offsets] = latent.to(pages.dtype)
        if q.is_cuda:
            lengths = None if self._most == 1 else self._lengths
            return attend_latent(q, pages, self._table, self._ends, lengths, value_dim=value_dim, scale=scale)
        keys = pages.unsqueeze(1)
        return attend_planned(q, keys, keys, self._planned(q), scale=scale, extras=Extras(value_dim=value_dim))

    def rotate_and_cache(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> bool:
        k_pages, v_pages = self._kv(layer)
        if not q.is_cuda or not runs_kernel(q, k_pages, v_pages, len(self._ends)):
            return False
        rope_write(q, k, v, cos, sin, k_pages, v_pages, self._pages, self._offsets)
        return True

    def rotary(self, rope: Any, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Context.rotary`, from a table that the cache keeps: in a decode step making angles would cost as much as the rest."""
        key = (rope.key, head_dim, dtype)
        if key not in self._rotary:
            table = self.cache.tables.get(key)
            if table is None or table[0].shape[0] < self._longest:
                places = torch.arange(1 << (self._longest - 1).bit_length(), device=self.positions.device)
                table = self.cache.tables[key] = rope.tables(places, head_dim, dtype, self.rope_len)
            self._rotary[key] = table[0][self.positions], table[1][self.positions]
        return self._rotary[key]

    def _kv(self, layer: int) -> tuple[Tensor, Tensor]:
        tensors = self.cache.layers[layer]
        return tensors["k"], tensors["v"]

    def _planned(self, q: Tensor) -> PagedPlan:
        if self._plan is None:
            batch = self._batch
            table = batch.table.astype(np.int64)
            self._plan = plan_sequences(
                table, batch.ends.tolist(), batch.lengths.tolist(), self.cache.block_size, q.device
            )
        return self._plan


def placed(batch: Batch, device: torch.device | str) -> dict[str, Tensor]:
    """The arrays of `batch` as tensors on `device`; a GPU gets one copy of all, from pinned memory, without waiting."""
    if torch.device(device).type == "cpu":
        return {name: torch.from_numpy(array) for name, array in batch.arrays()}
    packed = batch.pack()
    buffer = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    return {
        name: buffer[begin:end].view(getattr(torch, dtype.name)).view(shape)
        for name, begin, end, dtype, shape in layout(Batch, packed)
    }


class PagedBuffers(Paged):
    """What a captured pass of `num_seqs` sequences of one new token each reads: tensors that stay where they are.

    A sequence that only pads has length 0; its keys go to the null page, which the kernels never read.
    """

    def __init__(self, cache: KVCache, num_seqs: int, longest: int, device: torch.device) -> None:
        Context.__init__(self)
        self.cache = cache
        self.rope_len = cache.rope_len
        self._longest, self._most = longest, 1
        self._host = torch.zeros(5, num_seqs, dtype=torch.int64).pin_memory()
        self._flat = self._host.numpy()  # the same memory
        self._filled = 0  # sequences of the last step
        self._device = self._host.to(device)
        self.tokens, self.positions, self._pages, self._offsets, self._ends = self._device
        self._table = torch.zeros(num_seqs, -(-longest // cache.block_size), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event()
        self._known = np.zeros(self._table.shape, dtype=np.int32)  # what the device's table holds
        self._last: np.ndarray | None = None  # the table that came last: steps that change none share it

    def forget(self) -> None:
        """Drops what a pass has derived from the buffers, so that the next one derives it again."""
        self._rotary.clear()

    def fill(self, batch: Batch) -> None:
        """Brings a step's sequences to the device."""
        self._copied.synchronize()  # the host's side must not change under the last copy
        count, width = batch.table.shape
        self._flat[:, :count] = batch.flat
        if count < self._filled:
            self._flat[:, count : self._filled] = NULL_PAGE  # and position, offset and length 0
        self._filled = count
        self._device.copy_(self._host, non_blocking=True)
        if batch.table is not self._last:
            known = self._known[:count, :width]
            if not np.array_equal(known, batch.table):
                known[:] = batch.table
                table = torch.from_numpy(batch.table).pin_memory()
                self._table[:count, :width].copy_(table.to(self._table.device, non_blocking=True))
            self._last = batch.table
        self._copied.record()


def reads_in_place(
    cache: KVCache, device: torch.device | str, dtype: torch.dtype | None = None, *, softcap: bool = False
) -> bool:
    """Whether attention over every layer of `cache` runs without the host knowing lengths, as a captured graph needs.

    `dtype` is that of the queries, by default the cache's; `softcap`: whether a layer caps its scores.
    """
    if torch.device(device).type != "cuda":
        return False
    kept = [tensors for tensors in cache.layers if tensors]  # a layer without tensors reads those of another
    return all(
        set(tensors) == {"k", "v"}
        and choose(
            "attend_paged",
            locate(device),
            dtype=dtype or cache.dtype,
            page_dtype=tensors["k"].dtype,
            head_dim=tensors["k"].shape[-1],
            v_dim=tensors["v"].shape[-1],
            rows=1,
            softcap=softcap,
        ).backend
        == "triton"
        for tensors in kept
    )
