"""Chooses the sequences of the next step: all that decode, then prompts in chunks with the rest of the token budget.

Continuous batching: Yu et al. 2022 (Orca, OSDI). Chunked prefill beside decode: Agrawal et al. 2023, arXiv:2308.16369.
When no page is free, the newest sequence of the lowest priority is preempted by recomputation: it frees its pages and
starts again later, often with a part of its tokens still in the prefix cache.

A step may be scheduled before the tokens of the last one are known: a sequence then has tokens in flight, which count in
its length (`Seq.length`) but are not in `Seq.tokens` yet.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from hone.cost.serving import divided
from hone.serve.kv_policies.policy import Kept
from hone.serve.paging.pages import PagePool, chain_keys, root_key
from hone.serve.sequence import Seq, Work


class Scheduler:
    """Sequences (`seqs`) that wait and run, over one `PagePool`. `kept` says what stays of each one's pages.

    `batching` "static" and "dynamic" are the baselines that continuous batching is measured against: a batch runs until all
    its sequences are done before new ones start. Static starts with those that wait; dynamic waits until they are
    `max_num_seqs`, or until the oldest has waited `max_delay_s`. Up to `lookahead` guesses follow a sequence's token while
    at most `lookahead_seqs` sequences decode. With `num_stages` pipeline stages a step has that part of the decoding
    sequences, none with a token in flight, so that as many steps are under way, one a stage.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        batching: Literal["continuous", "dynamic", "static"] = "continuous",
        max_delay_s: float = 0.0,
        lookahead: int = 0,
        lookahead_seqs: int = 0,
        num_stages: int = 1,
        kept: Kept | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.kept = kept or Kept()
        self.max_delay_s = max_delay_s
        self._clock = clock
        self._renewed: list[int] = []  # pages that replace dropped ones, to be wiped before the next step
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.batching = batching
        self.lookahead = lookahead
        self.lookahead_seqs = lookahead_seqs
        self.num_stages = num_stages
        self.running: list[Seq] = []  # the last takes the place of one that leaves, so that few change their places
        self._coming: dict[bytes, Seq] = {}
        """Keys of pages that a running sequence will fill: others with the same prefix wait for them."""
        self._waiting: list[tuple[tuple[int, int], Seq]] = []  # a heap; aborted ones are skipped at its top
        self.num_waiting = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, seq: Seq) -> None:
        seq.state = "waiting"
        seq.waits_since = self._clock()
        heapq.heappush(self._waiting, (seq.rank, seq))
        self.num_waiting += 1

    def finish(self, seq: Seq) -> list[int]:
        """Removes a waiting or running sequence; returns the pages whose content is lost."""
        if seq.state == "waiting":
            self.num_waiting -= 1
        elif seq.state == "running":
            self._leave(seq)
        seq.state = "done"
        return self._release(seq)

    def _release(self, seq: Seq) -> list[int]:
        """Frees a sequence's pages; returns those whose content is lost."""
        self.pool.retain(seq.pages, seq.request.retention)
        gone = self.pool.free(seq.pages)
        seq.pages = []
        return gone

    def _leave(self, seq: Seq) -> None:
        """Takes a sequence out of the running ones."""
        place, last = self.running.index(seq), self.running.pop()
        if last is not seq:
            self.running[place] = last
        for key in seq.keys[seq.published :]:
            if self._coming.get(key) is seq:
                del self._coming[key]
        seq.keys = []

    def waiting(self) -> Iterator[Seq]:
        """Waiting sequences, in no particular order."""
        return (seq for _, seq in self._waiting if seq.state == "waiting")

    def schedule(self) -> tuple[list[Work], list[int]]:
        """The next step's work, decoding sequences first, and the newly allocated pages (to be wiped before use)."""
        fresh, self._renewed = self._renewed, []
        work = self._decode(fresh)
        budget = self.max_num_batched_tokens - sum(item.count + item.lookahead for item in work)
        prefilling = sorted((seq for seq in self.running if not seq.decoding), key=lambda seq: seq.rank)
        prefilling += self._admit(budget, prefilling, fresh)
        self._top_up(prefilling, fresh)
        work += self._chunks(prefilling, budget)
        if not work and prefilling and not any(seq.num_in_flight for seq in self.running):
            # Each has used its pages up, and those that it dropped are shared with others.
            self.preempt(max(self.running, key=lambda seq: seq.rank))
            self._renewed = fresh
            return self.schedule()
        return work, fresh

    def _top_up(self, seqs: Sequence[Seq], fresh: list[int]) -> None:
        """Gives the sequences that a KV policy bounds the pages that they need at once, as far as there are any."""
        if self.kept.window is None:
            return
        for seq in seqs:
            missing = self._most_pages(seq.length - seq.num_dropped) - len(seq.pages)
            pages = self.pool.allocate(min(max(0, missing), self.pool.num_free))
            if pages:
                seq.pages += pages
                fresh += pages

    def _decode(self, fresh: list[int]) -> list[Work]:
        """One token for every decoding sequence, by rank; the last may be preempted to free pages."""
        work = []
        seqs = [seq for seq in self.running if seq.decoding]
        if any(seq.request.priority for seq in seqs):
            seqs.sort(key=lambda seq: seq.rank)
        if self.num_stages > 1:
            share = -(-len(seqs) // self.num_stages)
            seqs = [seq for seq in seqs if not seq.num_in_flight][:share]
        pays = len(seqs) <= self.lookahead_seqs and len(seqs) * (self.lookahead + 1) <= self.max_num_batched_tokens
        lookahead = self.lookahead if pays else 0
        for seq in seqs:
            if seq.state != "running":
                continue  # preempted by an earlier sequence
            length = seq.length
            if seq.num_in_flight and length >= seq.max_tokens:
                continue  # the token in flight is its last
            extra = max(0, min(lookahead, seq.max_tokens - length - 1)) if seq.speculates else 0
            if extra and not self._grow(seq, length + extra, fresh):
                extra = 0
            while not self._grow(seq, length, fresh):
                victim = max(self.running, key=lambda other: other.rank)
                self.preempt(victim)
                work = [item for item in work if item.seq is not victim]
                if victim is seq:
                    break
            if seq.state == "running":
                work.append(Work(seq, seq.num_computed, 1, extra))
        return work

    def _grow(self, seq: Seq, length: int, fresh: list[int]) -> bool:
        """Allocates pages for `length` tokens; False when there are too few."""
        missing = -(-(length - seq.num_dropped) // self.pool.block_size) - len(seq.pages)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        seq.pages += pages
        fresh += pages
        return True

    def preempt(self, seq: Seq) -> None:
        """Moves a running sequence to the waiting ones; it is computed again later, except for tokens still cached."""
        self._leave(seq)
        self._release(seq)
        seq.num_computed = seq.num_dropped = seq.drafted = 0
        seq.compacted = False
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.add(seq)

    def _admit(self, budget: int, prefilling: list[Seq], fresh: list[int]) -> list[Seq]:
        """Admits waiting sequences by rank, while max_num_seqs, token budget and pages for all their tokens allow.

        One whose prefix is being computed by another waits for it: it then finds those pages in the cache.
        """
        admitted: list[Seq] = []
        if self.batching != "continuous" and (self.running or self.delay_s > 0):
            return admitted
        later: list[Seq] = []
        while self._waiting and len(self.running) < self.max_num_seqs and len(prefilling) + len(admitted) < budget:
            seq = self._waiting[0][1]
            if seq.state != "waiting":
                heapq.heappop(self._waiting)
                continue
            if seq.num_in_flight or len(later) >= self.max_num_seqs:
                break  # preempted, and its last token is not known yet
            if self._is_coming(seq):
                later.append(seq)
                heapq.heappop(self._waiting)
                continue
            if not self._find_pages(seq, fresh):
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            seq.state = "running"
            self.running.append(seq)
            admitted.append(seq)
        for seq in later:
            heapq.heappush(self._waiting, (seq.rank, seq))
        return admitted

    def _is_coming(self, seq: Seq) -> bool:
        """Whether a running sequence will fill the first page of a waiting sequence's prefix that is not in the cache."""
        if not self._coming or _scoring(seq) or self.batching != "continuous":
            return False
        tokens = self._shareable(seq)
        if not seq.keys:
            seq.keys = chain_keys(tokens, self.pool.block_size, seq.request.salt)
        first = self.pool.num_known(seq.keys)
        return first < (len(tokens) - 1) // self.pool.block_size and seq.keys[first] in self._coming

    def _shareable(self, seq: Seq) -> list[int]:
        """Its tokens whose pages may be shared: those of the prompt where it is compacted at the prompt's end."""
        return seq.tokens if self.kept.compaction is None else seq.tokens[: seq.num_prompt]

    @property
    def delay_s(self) -> float:
        """Seconds for which dynamic batching still waits before it starts the waiting sequences."""
        if self.batching != "dynamic" or self.num_waiting >= self.max_num_seqs or self.running:
            return 0.0
        oldest = min((seq.waits_since for seq in self.waiting()), default=-float("inf"))
        return max(0.0, oldest + self.max_delay_s - self._clock())

    def _find_pages(self, seq: Seq, fresh: list[int]) -> bool:
        """Allocates pages for all tokens of a waiting sequence, cached ones first; keeps one page per running sequence free.

        A KV policy may need fewer: then those of cached tokens to which no token attends any more are freed again.
        """
        if self.pool.enable_prefix_caching:
            seq.keys = seq.keys or chain_keys(self._shareable(seq), self.pool.block_size, seq.request.salt)
        found = [] if _scoring(seq) else self.pool.match(self._shareable(seq), seq.request.salt, seq.keys)
        size = self.pool.block_size
        dropped = self.kept.num_dropped(len(found) * size, size)
        sinks = self.kept.sink_pages(size)
        self.pool.free(found[sinks : sinks + dropped // size])
        cached = found[:sinks] + found[sinks + dropped // size :]
        missing = self._most_pages(len(seq.tokens) - dropped) - len(cached)
        if missing + len(self.running) > self.pool.num_free:
            self.pool.free(cached)
            return False
        pages = self.pool.allocate(missing)
        assert pages is not None, "the pool had enough pages"
        fresh += pages
        self.pool.count_hits(found)
        seq.pages = cached + pages
        seq.num_computed = seq.drafted = len(found) * size
        seq.num_dropped = dropped
        if self.kept.compaction is not None:
            seq.boundary = self.kept.compaction.boundary(seq.num_prompt, seq.num_computed)
        seq.published = len(found)
        self._set_page_end(seq)
        seq.key = self.pool.key_of(found[-1]) if found else root_key(seq.request.salt)
        if self.pool.enable_prefix_caching:
            for key in seq.keys[seq.published :]:
                self._coming.setdefault(key, seq)
        if seq.num_preemptions == 0:
            seq.num_cached = seq.num_computed
            self.prefix_queries += seq.num_prompt
            self.prefix_hits += seq.num_computed
        return True

    def _chunks(self, seqs: list[Seq], budget: int) -> list[Work]:
        """Divides the budget in order: a prompt gets at most half of the rest while others wait, and what they leave."""
        counts = divided([max(0, self._most_now(seq)) for seq in seqs], budget)
        return [Work(seq, seq.num_computed, count) for seq, count in zip(seqs, counts) if count]

    @staticmethod
    def pool_states(item: Work, states: np.ndarray) -> None:
        """Takes what a step kept of the hidden states (float32 [D]) of a sequence's tokens, chunk by chunk.

        A chunk that was launched before a preemption does not follow the ones since: it is left out.
        """
        seq, end = item.seq, item.start + item.count
        if seq.request.pooling == "last":
            seq.pooled = end, states
        elif item.start == 0:
            seq.pooled = end, states.copy()
        elif seq.pooled is not None and seq.pooled[0] == item.start:
            seq.pooled = end, seq.pooled[1] + states

    def _most_now(self, seq: Seq) -> int:
        """Tokens of a sequence that one step may compute: to its end, its pages' or its next compaction, if any."""
        room = len(seq.pages) * self.pool.block_size + seq.num_dropped
        return min(seq.length, seq.boundary, room) - seq.num_computed

    def _most_pages(self, length: int) -> int:
        """Pages that a sequence with `length` tokens to keep or compute needs at once."""
        return self.kept.most_pages(length, self.max_num_batched_tokens, self.pool.block_size)

    def _drop(self, seq: Seq) -> None:
        """Frees the pages to which no token attends any more; as many as the rest of its tokens needs are allocated again."""
        size, sinks = self.pool.block_size, self.kept.sink_pages(self.pool.block_size)
        dropped = self.kept.num_dropped(seq.num_computed, size)
        count = (dropped - seq.num_dropped) // size
        if count <= 0:
            return
        self.pool.free(seq.pages[sinks : sinks + count])
        stay = seq.pages[:sinks] + seq.pages[sinks + count :]
        seq.num_dropped = dropped
        wanted = self._most_pages(seq.length - dropped)
        self.pool.free(stay[wanted:])
        # Pages that others share are not free now: then there are fewer, and `_top_up` brings the rest.
        more = self.pool.allocate(max(0, min(count, wanted - len(stay), self.pool.num_free)))
        assert more is not None, "no more than there are"
        self._renewed += more
        seq.pages = stay[:wanted] + more  # a new list: what was copied from the old one is out of date

    def launched(self, work: Sequence[Work]) -> None:
        """The step of `work` is on its way: later steps find its keys and values in the pages, in the order of launches."""
        for item in work:
            seq = item.seq
            seq.num_in_flight += item.samples
            seq.num_computed = item.start + item.count
            if seq.num_computed >= seq.page_end:
                self.advance(seq, seq.num_computed)

    def advance(self, seq: Seq, computed: int, drafted: int | None = None) -> None:
        """`computed` tokens of the sequence are in its pages; full pages of known tokens enter the prefix cache.

        With a draft model only pages that also hold the draft model's keys (`drafted` tokens) are entered.
        """
        seq.num_computed = computed
        if self.pool.enable_prefix_caching and not seq.compacted:
            known = min(computed, len(seq.tokens))
            self._enter(seq, known if drafted is None else min(known, drafted))
        if self.kept.window is not None:
            self._drop(seq)

    def _set_page_end(self, seq: Seq) -> None:
        """Below this number of computed tokens no page of the sequence is full or dropped: `advance` has nothing to do."""
        if self.kept.window is not None:
            seq.page_end = 0
        elif self.pool.enable_prefix_caching:
            seq.page_end = (seq.published + 1) * self.pool.block_size
        else:
            seq.page_end = sys.maxsize

    def _enter(self, seq: Seq, known: int) -> None:
        """Enters the full pages of a sequence's first `known` tokens in the prefix cache."""
        size = self.pool.block_size
        while (seq.published + 1) * size <= known:
            start, place = seq.published * size, seq.published
            if place >= self.kept.sink_pages(size):
                place -= seq.num_dropped // size
            seq.key = self.pool.publish(seq.pages[place], seq.key, seq.tokens[start : start + size])
            seq.published += 1
            self._set_page_end(seq)
            if self._coming.get(seq.key) is seq:
                del self._coming[seq.key]


def _scoring(seq: Seq) -> bool:
    """Whether every position of its prompt must be computed, cached or not."""
    return (seq.prompt_logprobs is not None or seq.request.pooling == "mean") and seq.num_output == 0
