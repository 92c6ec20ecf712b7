"""The context of a serving pass: flat tokens of many sequences, their cache tensors in the pages of a `KVCache`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.model.context import Context
from hone.model.norm import RMSNorm
from hone.ops import attend_shared, rope_write
from hone.ops.dispatch import choose, locate
from hone.ops.paged.api import (
    PagedPlan,
    attend_latent,
    attend_paged,
    attend_planned,
    per_token,
    plan_sequences,
    runs_kernel,
    write_kv,
)
from hone.ops.paged.reference import Extras
from hone.serve.device.placing import FixedInputs, Placer
from hone.serve.paging.cache import KVCache
from hone.serve.paging.compiled_step import compiled_step
from hone.serve.paging.sharing import NONE_SHARED, SharedPages
from hone.serve.step import NULL_PAGE, ForwardBatch, SamplingMetadata


class Paged(Context):
    """One forward pass over the T tokens of a `ForwardBatch`; their keys and values are written before attention reads them."""

    cached = True
    _tree: Tensor | None = None
    _shared: Tensor | None = None
    """int32 [3] on the device: `SharedPages` of a step of one new token a sequence, where it is worth reading those pages once."""

    def __init__(
        self,
        cache: KVCache,
        batch: ForwardBatch,
        device: torch.device | str = "cpu",
        on: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`on`: the batch's arrays on the device, by name, when they are there already."""
        super().__init__()
        self.cache = cache
        self.rope_len = cache.rope_len
        self._batch = batch
        self._longest = int(batch.positions.max()) + 1
        self._most = int(batch.lengths.max())
        self._plan: PagedPlan | None = None
        on = Placer(device).place(dict(batch.arrays())) if on is None else on
        self.tokens, self.positions = on["tokens"], on["positions"]
        self._pages, self._offsets = on["pages"], on["offsets"]
        self._ends, self._lengths, self._table = on["ends"], on["lengths"], on["table"]

    @property
    def real(self) -> Tensor:
        """As in `Context`: what only pads writes its keys to the null page."""
        return self._pages != NULL_PAGE

    def run_layers(self, decoder: Any, x: Tensor) -> Tensor | None:
        """On a CPU a step of one new token a sequence is one compiled call, for models that it covers."""
        if x.device.type != "cpu" or self._most > 1 or self._batch.any_adapters:
            return None
        step = compiled_step(decoder, self.cache, len(x), self._longest)
        if step is None:
            return None
        return step(x, (self.positions, self._pages, self._offsets, self._ends, self._table))

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        k_pages, v_pages = self._kv(layer)
        window, sink_tokens = self.cache.kept.view(window)
        scales = self.cache.scales[layer]
        if k is not None and v is not None:  # else borrowed from `layer`, which has written them
            if not scales:
                k, v = k.to(k_pages.dtype), v.to(v_pages.dtype)
            write_kv(k, v, k_pages, v_pages, self._pages, self._offsets, **scales)
        if softcap is not None:
            if q.is_cuda:
                runs_kernel(q, k_pages, v_pages, len(self._ends), softcap=True)  # says once that it does not, and why
        elif q.is_cuda and runs_kernel(q, k_pages, v_pages, len(self._ends)):
            if self._shared is not None and window is None and sinks is None and k_pages.dtype == q.dtype:
                return attend_shared(q, k_pages, v_pages, self._table, self._ends, self._shared, scale=scale)
            lengths = None if self._most == 1 else self._lengths
            return attend_paged(
                q, k_pages, v_pages, self._table, self._ends, lengths, scale=scale, window=window, sink_tokens=sink_tokens,
                sinks=sinks, max_query_len=self._most, tree=self._tree, k_scale=scales.get("k_scale"), v_scale=scales.get("v_scale"),
            )  # fmt: skip
        expanded = {name: per_token(one, k_pages) for name, one in scales.items()}
        extras = Extras(sink_tokens, sinks, softcap=softcap, tree=self._tree, **expanded)
        return attend_planned(q, k_pages, v_pages, self._planned(q), scale=scale, window=window, extras=extras)

    def attend_latent(self, layer: int, q: Tensor, latent: Tensor, *, value_dim: int, scale: float) -> Tensor:
        pages = self.cache.layers[layer]["latent"]
        pages[self._pages, self._offsets] = latent.to(pages.dtype)
        if q.is_cuda:
            lengths = None if self._most == 1 else self._lengths
            return attend_latent(q, pages, self._table, self._ends, lengths, value_dim=value_dim, scale=scale)
        keys = pages.unsqueeze(1)
        return attend_planned(q, keys, keys, self._planned(q), scale=scale, extras=Extras(value_dim=value_dim))

    def rotate_and_cache(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> bool:
        k_pages, v_pages = self._kv(layer)
        if not q.is_cuda or not runs_kernel(q, k_pages, v_pages, len(self._ends)):
            return False
        options: dict[str, Any] = dict(self.cache.scales[layer])
        if norms is not None and type(norms[0]) is type(norms[1]) is RMSNorm and norms[0].eps == norms[1].eps:
            options |= {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": norms[0].eps}
        elif norms is not None:
            q.copy_(norms[0](q))
            k = norms[1](k)
        rope_write(q, k, v, cos, sin, k_pages, v_pages, self._pages, self._offsets, **options)
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


class BlockTable:
    """The pages of every place of a step, on a GPU: a step brings only the rows that changed since the last one."""

    def __init__(self, num_seqs: int, num_pages: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_seqs, num_pages, dtype=torch.int32, device=device)
        self._known = np.zeros((num_seqs, num_pages), dtype=np.int32)
        self._last: np.ndarray | None = None

    def changes(self, table: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays that `bring` needs on the device to hold `table` [S, P]; none when it holds it already."""
        if table is self._last:
            return {}
        self._last = table
        known = self._known[: len(table), : table.shape[1]]
        rows = np.flatnonzero((known != table).any(1))
        if not len(rows):
            return {}
        known[rows] = table[rows]
        return {"table_rows": rows, "table_values": table[rows]}

    def bring(self, on: Mapping[str, Tensor]) -> None:
        """Writes the placed arrays of `changes`."""
        if "table_rows" in on:
            values = on["table_values"]
            self.tensor[:, : values.shape[1]].index_copy_(0, on["table_rows"], values)

    def forget(self) -> None:
        """After a step that failed, perhaps before `bring`: the next one brings all its rows."""
        self._last = None
        self._known.fill(-1)


class PagedBuffers(Paged):
    """What a captured pass of `num_tokens` tokens of `num_seqs` sequences reads: tensors that stay where they are.

    `num_seqs` None: one new token of each sequence. A sequence that only pads has length 0; keys of padding go to the null
    page, which the kernels never read.
    """

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        num_tokens: int,
        num_seqs: int | None,
        longest: int,
        device: torch.device,
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: pages that sequences share are read once (`fill` is told which)."""
        Context.__init__(self)
        self.cache = cache
        self.rope_len = cache.rope_len
        self._longest, self._most = longest, 1 if num_seqs is None else num_tokens
        seqs = num_seqs or num_tokens
        sizes = {
            "flat": ((5, num_tokens), np.int64),
            "seeds": ((seqs,), np.int64),
            "seqs": ((2, seqs), np.int32),
            "top_k": ((seqs,), np.int32),
            "numbers": ((3, seqs), np.float32),
            "shared": ((3,), np.int32),
            "adapter_slots": ((num_tokens,), np.int32),
        }
        self._inputs = FixedInputs(sizes, device)
        on = self._inputs.on
        self.tokens, self._sources, self.positions, self._pages, self._offsets = on["flat"]
        self._ends, self._lengths = on["seqs"]
        self.seeds, self.top_k = on["seeds"], on["top_k"]
        self.temperature, self.top_p, self.min_p = on["numbers"]
        self._table = table[:seqs]
        self.adapter_slots = on["adapter_slots"]
        self._shared = on["shared"] if shared else None

    def forget(self) -> None:
        """Drops what a pass has derived from the buffers, so that the next one derives it again."""
        self._rotary.clear()
        self.memo.clear()

    def fill(
        self, batch: ForwardBatch, sampling: SamplingMetadata | None = None, shared: SharedPages = NONE_SHARED
    ) -> None:
        """Brings a step's arrays to the buffers, in one copy. `sampling`: how all its sequences draw."""
        count, seqs = len(batch.tokens), batch.num_seqs
        host = self._inputs.next()
        flat, lengths = host["flat"], host["seqs"]
        flat[0, :count], flat[1, :count], flat[2, :count] = batch.tokens, batch.sources, batch.positions
        flat[3, :count], flat[4, :count] = batch.pages, batch.offsets
        lengths[0, :seqs], lengths[1, :seqs] = batch.ends, batch.lengths
        host["adapter_slots"][:count], host["adapter_slots"][count:] = batch.adapter_slots, -1
        if count < flat.shape[1]:
            flat[:, count:] = 0
            flat[1, count:] = -1
        if seqs < lengths.shape[1]:
            lengths[:, seqs:] = 0
        host["shared"][:] = shared
        if sampling is not None:
            numbers = host["numbers"]
            host["seeds"][:seqs] = sampling.seed
            host["top_k"][:seqs] = sampling.top_k
            numbers[0, :seqs], numbers[1, :seqs], numbers[2, :seqs] = (
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
            )
            numbers[0, seqs:] = 0
        self._inputs.send()

    def take(self, last: Tensor) -> None:
        """Reads the tokens that the host did not know from `last` [places], the tokens of the last step."""
        self.tokens.copy_(known_tokens(self.tokens, self._sources, last))


def known_tokens(tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
    """tokens [T] with those of `last` at `sources` where these are not -1."""
    return torch.where(sources >= 0, last[sources.clamp(min=0)], tokens)


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
