"""Compaction of sequences between steps: which tokens their attention went to, and the pages that keep only these.

Legend: n observed tokens, L slots of a sequence's pages, H query heads, KV key/value heads, G = H / KV, Dh head width.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hone.serve.kv_policies.policy import Compaction
from hone.serve.paging.cache import KVCache
from hone.serve.paging.paged import Paged
from hone.serve.runner import Runner
from hone.serve.scheduler import Scheduler
from hone.serve.sequence import Seq
from hone.serve.step import ForwardBatch

_CHUNK = 512
"""Tokens whose attention is computed in one pass."""

_SCORES = 2**24
"""Most scores that exist at once, float32."""

AttentionScores = dict[int, Tensor]
"""By layer: the attention that each slot received in each key head, float32 [KV, L]."""


class Compactor:
    """Compacts the running sequences that have come to the end of a part, before the next step is scheduled.

    All work is queued on the device behind the steps that were launched: nothing is read back, because how many tokens
    stay is known beforehand.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler, self._pages = runner, scheduler, scheduler.pages
        assert self._pages.kept.compaction is not None, "the policy compacts"
        self._compaction: Compaction = self._pages.kept.compaction
        self._block_size = self._pages.pool.block_size
        self._scores: WeakKeyDictionary[Seq, tuple[int, AttentionScores]] = WeakKeyDictionary()
        """What a sequence's slots have received so far, and how often it was preempted when that began."""

    @torch.inference_mode()
    def run(self) -> list[tuple[Seq, str]]:
        """Compacts what is due; returns the sequences for which it failed, with the error."""
        failed = []
        for seq in list(self._scheduler.running):
            if seq.state == "running" and seq.num_computed == seq.boundary:
                try:
                    self._compact(seq)
                except Exception as error:
                    failed.append((seq, f"{type(error).__name__}: {error}"))
        return failed

    def _compact(self, seq: Seq) -> None:
        rule = self._compaction
        boundary = seq.boundary
        slots = seq.num_computed - seq.num_dropped
        kept = rule.num_kept(slots)
        later = rule.accumulates and rule.num_kept(seq.max_tokens) < seq.max_tokens  # scores will be needed
        if kept < slots or later:
            scores = self._observed(seq, rule.observed(seq.num_prompt, boundary))
            if kept < slots:
                keep = {layer: rule.select(one, kept) for layer, one in scores.items()}
                if not self._move(seq, keep, kept):
                    self._scheduler.preempt(seq)
                    return
                scores = {layer: one.gather(1, keep[layer]) for layer, one in scores.items()}
            if rule.accumulates:
                self._scores[seq] = seq.num_preemptions, scores
        seq.boundary = rule.boundary(seq.num_prompt, seq.num_computed)

    def _observed(self, seq: Seq, first: int) -> AttentionScores:
        """The attention that every slot received from the queries of the tokens `first` ... , and before where that counts."""
        found: AttentionScores = {}
        for start in range(first, seq.num_computed, _CHUNK):
            end = min(start + _CHUNK, seq.num_computed)
            batch = ForwardBatch.of(
                seq.tokens[start:end], [start - seq.num_dropped], [end - start], np.array([seq.pages], dtype=np.int32),
                self._block_size, dropped=[seq.num_dropped]
            )  # fmt: skip
            _add(found, observe(self._runner.model, self._runner.cache, batch, self._runner.device))
        preemptions, earlier = self._scores.get(seq, (-1, {}))
        if preemptions == seq.num_preemptions:
            _add(found, earlier)
        return found

    def _move(self, seq: Seq, keep: AttentionScores, kept: int) -> bool:
        """Moves the kept tokens into as few pages as they need; False when there are no pages to move them to."""
        dropped = seq.num_computed - kept
        targets = self._pages.compaction_targets(seq, -(-(seq.length - dropped) // self._block_size))
        if targets is None:
            return False
        compact(self._runner.cache, seq.pages, targets, keep)
        self._pages.moved(seq, targets, dropped)
        return True


def _add(scores: AttentionScores, others: AttentionScores) -> None:
    """Adds to `scores` those of fewer or as many slots, or takes longer ones."""
    for layer, other in others.items():
        one = scores.get(layer)
        if one is not None:
            long, short = (one, other) if one.shape[1] >= other.shape[1] else (other, one)
            long[:, : short.shape[1]] += short
            other = long
        scores[layer] = other


def observe(model: Any, cache: KVCache, batch: ForwardBatch, device: torch.device | str) -> AttentionScores:
    """The attention that each slot of one sequence received from the queries of `batch`, whose keys are in the cache already."""
    context = _Observing(cache, batch, device)
    model.hidden(context.tokens, context)
    return context.received


class _Observing(Paged):
    """A pass that writes nothing and adds up the probabilities of the attention."""

    def __init__(self, cache: KVCache, batch: ForwardBatch, device: torch.device | str) -> None:
        super().__init__(cache, batch, device)
        self.received: AttentionScores = {}

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        keys = self.cache.layers[layer]["k"]
        count = int(self._batch.ends[0])
        some = {name: options.get(name) for name in ("softcap", "sinks")}
        found = received_attention(q, keys, self._table[0], count, options["scale"], **some)
        _add(self.received, {layer: found})
        return super().attend(layer, q, None, None, **options)

    def run_layers(self, decoder: Any, x: Tensor) -> None:
        """A compiled step tells nothing of its attention."""

    def rotate_and_cache(self, *given: Any) -> bool:
        return False


def received_attention(
    q: Tensor,
    k_pages: Tensor,
    table: Tensor,
    num_slots: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """float32 [KV, num_slots]: causal softmax probabilities of the queries q [n, H, Dh], summed over them and each key head's group.

    The queries are those of the last n of `num_slots` slots; k_pages [num_pages, KV, page_size, Dh], table [P].
    """
    count, heads, width = q.shape
    kv_heads, size = k_pages.shape[1:3]
    pages = table[: -(-num_slots // size)].long()
    keys = k_pages[pages].transpose(0, 1).reshape(kv_heads, -1, width)[:, :num_slots].float()
    queries = q.float().view(count, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)  # [KV, G, n, Dh]
    indices = torch.arange(num_slots - count, num_slots, device=q.device)
    slots = torch.arange(num_slots, device=q.device)
    received = torch.zeros(kv_heads, num_slots, device=q.device)
    block = max(1, _SCORES // (heads * num_slots))
    for start in range(0, count, block):
        some = slice(start, start + block)
        scores = queries[:, :, some] @ keys[:, None].transpose(-2, -1) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores.masked_fill_(slots > indices[some, None], float("-inf"))
        shares = scores.softmax(-1)
        if sinks is not None:
            scores_of_sinks = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1)
            shares *= (scores.logsumexp(-1, keepdim=True) - scores_of_sinks).sigmoid()
        received += shares.sum((1, 2))
    return received


def compact(cache: KVCache, pages: list[int], targets: list[int], keep: AttentionScores) -> None:
    """Moves slots keep[layer] [KV, m] of the sequence in `pages` to the first m slots of `targets`, for every head its own.

    Other slots of `targets` become zero. The two lists may share pages.
    """
    size = cache.block_size
    for layer, slots in keep.items():
        heads = torch.arange(len(slots), device=slots.device)[:, None]
        source = torch.tensor(pages, device=slots.device)
        target = torch.tensor(targets, device=slots.device)
        indices = torch.arange(slots.shape[1], device=slots.device)
        for tensor in cache.layers[layer].values():
            moved = tensor[source[slots // size], heads, slots % size]  # a copy
            tensor[target] = 0
            tensor[target[indices // size], heads, indices % size] = moved
