"""CUDA graphs of steps: a step is one replay instead of hundreds of launches out of Python.

The paged kernels find their work on the device, so a graph depends on the (padded) numbers of tokens and sequences alone.
A graph of decoding sequences also draws their next tokens. Graphs are captured when they are first needed or while the
engine is idle, so it starts without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hone.cost.serve.captured import MIXED_TOKENS, most_mixed, padded_tokens
from hone.cost.serve.serving import MOST_CAPTURED
from hone.model.decoder import Decoder
from hone.ops import sample
from hone.ops.dispatch import say_once
from hone.serve.adapters.registry import Adapters
from hone.serve.device.fast_sizes import fast_sizes, product_seconds
from hone.serve.kv_policies.policy import KeptTokens
from hone.serve.paging.cache import KVCache
from hone.serve.paging.paged import PagedBuffers
from hone.serve.paging.sharing import NONE_SHARED, SharedPages, shared_pages
from hone.serve.step import ForwardBatch, SamplingMetadata

_SHARING = 8
"""Fewest sequences for which a graph that reads shared pages once is captured."""

_NEAR, _OFTEN = 1.25, 16
"""A captured size serves for one smaller by this factor, until that one has come so many times."""

_OWN = 64
"""Most rows that hone's own kernels multiply, in a time that grows with the rows."""

Draws = Literal["", "plain", "filtered"]
"""What a graph does after the last layer: nothing, draw by temperature alone, or with top-k, top-p and min-p."""


class GraphKey(NamedTuple):
    """A captured pass: its tokens, its sequences (None: one token of each) and how it draws."""

    tokens: int
    seqs: int | None
    draws: Draws = ""
    shared: bool = False
    """Whether pages that sequences share are read once."""
    adapted: bool = False
    """Whether it adds the factors of adapters."""


def padded(num_seqs: int) -> int:
    """The sequences of the graph that serves `num_seqs`: a power of 2 up to 8, then a multiple of 8 or of a sixteenth."""
    above = 1 << (num_seqs - 1).bit_length()
    step = max(8, above // 16)
    return above if num_seqs <= 8 else -(-num_seqs // step) * step


def padded_shared(num_seqs: int) -> int:
    """The same where pages are read once, which makes padding cheap: a power of 2, or three quarters of one."""
    above = 1 << (num_seqs - 1).bit_length()
    return above // 4 * 3 if above >= 4 and num_seqs <= above // 4 * 3 else above


@dataclass
class _Captured:
    buffers: PagedBuffers
    graph: torch.cuda.CUDAGraph
    hidden: Tensor | None
    tokens: Tensor | None  # int64 [S]: what was drawn, -1 where the logits are not finite
    taps: dict[int, Tensor | None]  # hidden states after some layers, where a drafter reads them
    tables: list[tuple[Tensor, Tensor]]  # the rotary tables it reads; the cache may replace its own


class StepGraphs:
    """Captured steps of one model over one cache."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: Tensor,
        last: Tensor,
        device: torch.device | str,
        *,
        draws: bool = True,
        adapters: Adapters | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """`table` [places, pages] and `last` [places]: the pages of every place, and the tokens of the last step.

        `draws`: whether graphs that are captured while the engine is idle draw tokens. `taps`: layers after which a drafter
        reads hidden states.
        """
        self._taps = taps
        self._draws: Draws = "plain" if draws else ""
        self._model, self._cache, self._device = model, cache, torch.device(device)
        self._adapters = adapters
        if adapters is not None:
            adapters.slots.when_scaled.append(self._forget_adapted)
        self._table, self._last = table, last
        self._longest = cache.rope_len or model.config.max_seq_len
        if cache.kept == KeptTokens():  # else positions may be larger than the cache
            self._longest = min(self._longest, cache.num_pages * cache.block_size)
        self._captured: dict[GraphKey, _Captured] = {}
        self._seen: dict[GraphKey, int] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._broken = False
        self._most = min(MOST_CAPTURED, len(table))
        self._most_mixed = most_mixed(
            model.config.num_layers, model.config.active_params, MIXED_TOKENS
        )  # alike on all ranks
        self._states: dict[int | None, Tensor] = {}
        """Hidden states [T, D] that the last replay left, by layer, the last one's at None: one place for all graphs, whose own memory is
        then the same, too."""
        self._found: tuple[object, SharedPages] = None, NONE_SHARED
        self._pending: list[GraphKey] | None = None
        self._fast: dict[int, int] | None = None
        """The number of sequences that serves a padded one best; None: not measured."""

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def choose(self, batch: ForwardBatch, draws: Draws = "") -> GraphKey | None:
        """The graph that runs a step; None: run it without one. `draws`: what it may do if all its sequences decode.

        Where the smallest size that fits is not captured, a larger one serves, if it wastes little, until the size has come
        some times. Passes over prompts are captured when they come a second time; those with adapters later, which may come and go with one.
        """
        beyond = self._broken or batch.positions.max() >= self._longest
        wanted = None if beyond else self._size(batch, draws)
        if wanted is not None and wanted.shared and wanted not in self._captured and not self._comes_again(wanted):
            wanted = wanted._replace(shared=False)
        if wanted is None or wanted in self._captured:
            return wanted
        seen = self._seen[wanted] = self._seen.get(wanted, 0) + 1
        near = [key for key in self._captured if key[1:] == wanted[1:] and 1 <= key[0] / wanted[0] <= _NEAR]
        if near and seen < _OFTEN:
            return min(near, key=lambda key: key[0])
        if seen < (_OFTEN if wanted.adapted else 2 if wanted.seqs is not None else 1):
            return None
        return wanted if self._capture(wanted) else None

    def _size(self, batch: ForwardBatch, draws: Draws) -> GraphKey | None:
        adapted = self._adapters is not None and batch.any_adapters
        if len(batch.tokens) == batch.num_seqs and (batch.lengths == 1).all():
            count = self._padded(batch.num_seqs)
            shared = count >= _SHARING and self._shared(batch).pays(batch.ends, self._cache.block_size)
            return GraphKey(count, None, draws, shared, adapted) if batch.num_seqs <= count else None
        tokens = padded_tokens(len(batch.tokens))
        return GraphKey(tokens, len(self._table), adapted=adapted) if tokens <= self._most_mixed else None

    def _padded(self, num_seqs: int) -> int:
        """The sequences of the graph that serves `num_seqs`: `padded`, or a size near it that the GPU computes faster.

        Ranks, which need equal sizes and may measure unequal times, take `padded`; so do few rows, whose products are hone's own.
        """
        count = min(padded(num_seqs), self._most)  # no step has more
        if count <= _OWN or type(self._model) is not Decoder:
            return count
        if self._fast is None:
            sizes = sorted({min(padded(one), self._most) for one in range(_OWN + 1, self._most + 1)})
            seconds = product_seconds(self._model, sizes)
            self._fast = {} if seconds is None else fast_sizes(sizes, seconds)
        return self._fast.get(count, count)

    def _comes_again(self, key: GraphKey) -> bool:
        """Whether the key has come before: one that another size serves, too, is not captured for a single step."""
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] > 1

    def _shared(self, batch: ForwardBatch) -> SharedPages:
        """The pages that a step's sequences share, where the cache has layers that may read them once."""
        if self._found[0] is not batch:
            reads = self._cache.kept == KeptTokens() and not any(self._cache.scales)
            self._found = batch, shared_pages(batch.table, batch.ends, self._cache.block_size) if reads else NONE_SHARED
        return self._found[1]

    def capture_next(self) -> bool:
        """Captures one more size, for an engine that has nothing else to do; False when all are there."""
        if self._pending is None:
            decode = sorted({self._padded(count) for count in range(1, self._most + 1)}, reverse=True)
            mixed = sorted({padded_tokens(count) for count in range(1, self._most_mixed + 1)}, reverse=True)
            sizes = [GraphKey(count, None, self._draws) for count in decode]
            sizes += [GraphKey(count, len(self._table)) for count in mixed if count <= self._most_mixed]
            shared = sorted(
                {min(padded_shared(count), self._most) for count in decode if count >= _SHARING}, reverse=True
            )
            sizes += [GraphKey(count, None, self._draws, shared=True) for count in shared]
            self._pending = sizes + [key._replace(adapted=True) for key in sizes if self._adapters is not None]
        while self._pending and not self._broken:
            size = self._pending.pop(0)
            if size not in self._captured:
                return self._capture(size)
        return False

    def close(self) -> None:
        """Frees all graphs; steps run without them then. A communicator of NCCL does not end while graphs have its collectives."""
        self._broken = True
        for one in self._captured.values():
            one.graph.reset()
        self._captured.clear()

    @torch.inference_mode()
    def capture_seen(self) -> int:
        """Captures every size that has come and has no graph, so that the same load runs again without a capture; how many."""
        return sum(self._capture(key) for key in list(self._seen) if key not in self._captured and not self._broken)

    def hidden(self, key: GraphKey, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, D] of a graph that draws nothing, valid until the next call."""
        step = self._captured[key]
        assert step.hidden is not None, f"{key} draws"
        step.buffers.fill(batch, None, self._shared(batch) if key.shared else NONE_SHARED)
        step.graph.replay()
        return step.hidden[: len(batch.tokens)]

    def tapped(self, key: GraphKey, batch: ForwardBatch) -> dict[int, Tensor | None]:
        """Hidden states [T, D] of the replay before after the layers that a drafter reads, valid until the next one."""
        held = self._captured[key].taps
        return {layer: None if one is None else one[: len(batch.tokens)] for layer, one in held.items()}

    def drawn(self, key: GraphKey, batch: ForwardBatch, sampling: SamplingMetadata) -> Tensor:
        """int64 [S], valid until the next call: the tokens drawn, which `last` has too; -1 where logits are not finite."""
        step = self._captured[key]
        assert step.tokens is not None, f"{key} draws nothing"
        step.buffers.fill(batch, sampling, self._shared(batch) if key.shared else NONE_SHARED)
        step.graph.replay()
        return step.tokens[: batch.num_seqs]

    def _forget_adapted(self) -> None:
        """Drops the graphs that add factors, which from now on do more; they are captured anew."""
        torch.cuda.synchronize()
        self._captured = {key: one for key, one in self._captured.items() if not key.adapted}

    def _capture(self, key: GraphKey) -> bool:
        buffers = PagedBuffers(
            self._cache, self._table, key.tokens, key.seqs, self._longest, self._device, shared=key.shared
        )
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # compiles kernels and sets libraries up before the capture
                self._pass(buffers, key, self._last.clone())
            torch.cuda.current_stream().wait_stream(side)
            buffers.forget()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # NCCL has threads
                hidden, tokens = self._pass(buffers, key, self._last)
        except RuntimeError as error:
            self._broken = True
            say_once(f"steps run without CUDA graphs: {str(error).splitlines()[0]}")
            return False
        taps = buffers.taps or {}
        self._captured[key] = _Captured(buffers, graph, hidden, tokens, taps, list(self._cache.tables.values()))
        return True

    def _pass(self, buffers: PagedBuffers, key: GraphKey, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The launches of one graph: hidden states, or drawn tokens, which are left in `last`, too."""
        buffers.take(last)
        buffers.taps = dict.fromkeys(self._taps)
        if key.adapted and self._adapters is not None:
            with self._adapters.slots.of(buffers.adapter_slots):
                hidden = self._adapters.model.hidden(buffers.tokens, buffers)
        else:
            hidden = self._model.hidden(buffers.tokens, buffers)
        for layer, one in (buffers.taps or {}).items():
            assert one is not None, f"layer {layer} was not tapped"
            buffers.taps[layer] = self._kept(layer, one, key)
        if not key.draws:
            return self._kept(None, hidden, key), None
        filters = (buffers.top_k, buffers.top_p, buffers.min_p) if key.draws == "filtered" else ()
        where = (buffers.seeds, buffers.positions + 1)
        tokens, peaks = sample(self._model.head(hidden), buffers.temperature, *filters, keys=where, peaks=True)
        last[: key.tokens].copy_(tokens)
        return None, torch.where(peaks.isfinite(), tokens, -1)

    def _kept(self, layer: int | None, x: Tensor, key: GraphKey) -> Tensor:
        """x [T, D] after `layer`, copied to where all graphs leave it."""
        held = self._states.get(layer)
        if held is None or len(held) < key.tokens:
            held = x.new_empty(max(self._most, self._most_mixed, key.tokens), x.shape[-1])
            self._states[layer] = held
        kept = held[: key.tokens]
        kept.copy_(x)
        return kept
