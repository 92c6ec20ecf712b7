"""Chooses the sequences of the next step: all that decode, then prompts in chunks with the rest of the token budget.

Continuous batching: Yu et al. 2022 (Orca, OSDI). Chunked prefill beside decode: Agrawal et al. 2023, arXiv:2308.16369.
When no page is free, the newest sequence of the lowest priority is preempted by recomputation: it frees its pages and
starts again later, often with a part of its tokens still in the prefix cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hone.serve.choosing import Entry
from hone.serve.detokenize import TextStream
from hone.serve.paging.pages import PagePool, root_key
from hone.serve.request import Request, TokenLogprob

State = Literal["waiting", "running", "done"]


@dataclass(eq=False)
class Seq:
    """One unfinished request: its tokens so far, the number of computed ones, and their pages."""

    request: Request
    arrival: int
    max_tokens: int  # total length at which it must end
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_prompt: int = 0
    state: State = "waiting"
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the pages
    num_cached: int = 0  # of the prompt, found in the prefix cache at first admission
    drafted: int = 0  # tokens whose keys and values are in the draft model's cache
    published: int = 0  # full pages in the prefix cache
    key: bytes = b""  # key of the last published page
    num_preemptions: int = 0
    speculates: bool = False
    entry: Entry | None = None
    stream: TextStream | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.num_prompt = len(self.tokens)

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest is scheduled first."""
        return (self.request.priority, self.arrival)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def decoding(self) -> bool:
        """True when all but its last token are in the cache."""
        return self.num_computed == len(self.tokens) - 1 and self.num_computed > 0


@dataclass
class Work:
    """One sequence's part of a step: `count` tokens from `start` on.

    `lookahead` is the most guesses that may follow. The drafter sets their number (`num_guesses`), the tokens (`guesses`;
    empty when a draft model computes them in the step), and the draft model's input (`draft_start`, `draft_count`).
    """

    seq: Seq
    start: int
    count: int
    lookahead: int = 0
    num_guesses: int = 0
    guesses: Sequence[int] = ()
    draft_start: int = 0
    draft_count: int = 0

    @property
    def samples(self) -> bool:
        """True when the step computes the sequence's next token."""
        return self.start + self.count == len(self.seq.tokens)


class Scheduler:
    """Sequences (`seqs`) that wait and run, over one `PagePool`.

    `batching` "static" is the baseline that continuous batching is measured against: a batch runs until all its
    sequences are done before new ones start. Up to `lookahead` guesses follow a sequence's token while at most
    `lookahead_seqs` sequences decode.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        batching: Literal["continuous", "static"] = "continuous",
        lookahead: int = 0,
        lookahead_seqs: int = 0,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.batching = batching
        self.lookahead = lookahead
        self.lookahead_seqs = lookahead_seqs
        self.running: list[Seq] = []  # in order of admission
        self._waiting: list[tuple[tuple[int, int], Seq]] = []  # a heap; aborted ones are skipped at its top
        self.num_waiting = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, seq: Seq) -> None:
        seq.state = "waiting"
        heapq.heappush(self._waiting, (seq.rank, seq))
        self.num_waiting += 1

    def finish(self, seq: Seq) -> list[int]:
        """Removes a waiting or running sequence; returns the pages whose content is lost."""
        if seq.state == "waiting":
            self.num_waiting -= 1
        elif seq.state == "running":
            self.running.remove(seq)
        seq.state = "done"
        gone = self.pool.free(seq.pages)
        seq.pages = []
        return gone

    def waiting(self) -> Iterator[Seq]:
        """Waiting sequences, in no particular order."""
        return (seq for _, seq in self._waiting if seq.state == "waiting")

    def schedule(self) -> tuple[list[Work], list[int]]:
        """The next step's work, decoding sequences first, and the newly allocated pages (to be wiped before use)."""
        fresh: list[int] = []
        work = self._decode(fresh)
        budget = self.max_num_batched_tokens - sum(item.count + item.lookahead for item in work)
        prefilling = sorted((seq for seq in self.running if not seq.decoding), key=lambda seq: seq.rank)
        prefilling += self._admit(budget, prefilling, fresh)
        return work + self._chunks(prefilling, budget), fresh

    def _decode(self, fresh: list[int]) -> list[Work]:
        """One token for every decoding sequence, by rank; the last may be preempted to free pages."""
        work = []
        seqs = [seq for seq in self.running if seq.decoding]
        if any(seq.request.priority for seq in seqs):
            seqs.sort(key=lambda seq: seq.rank)
        pays = len(seqs) <= self.lookahead_seqs and len(seqs) * (self.lookahead + 1) <= self.max_num_batched_tokens
        lookahead = self.lookahead if pays else 0
        for seq in seqs:
            if seq.state != "running":
                continue  # preempted by an earlier sequence
            length = len(seq.tokens)
            extra = max(0, min(lookahead, seq.max_tokens - length - 1)) if seq.speculates else 0
            if extra and not self._grow(seq, length + extra, fresh):
                extra = 0
            while not self._grow(seq, length, fresh):
                victim = max(self.running, key=lambda other: other.rank)
                self._preempt(victim, fresh)
                work = [item for item in work if item.seq is not victim]
                if victim is seq:
                    break
            if seq.state == "running":
                work.append(Work(seq, seq.num_computed, 1, extra))
        return work

    def _grow(self, seq: Seq, length: int, fresh: list[int]) -> bool:
        """Allocates pages for `length` tokens; False when there are too few."""
        missing = -(-length // self.pool.block_size) - len(seq.pages)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        seq.pages += pages
        fresh += pages
        return True

    def _preempt(self, seq: Seq, fresh: list[int]) -> None:
        """Moves a running sequence to the waiting ones; it is computed again later, except for tokens still cached."""
        self.running.remove(seq)
        self.pool.free(seq.pages)
        seq.pages = []
        seq.num_computed = seq.drafted = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.add(seq)

    def _admit(self, budget: int, prefilling: list[Seq], fresh: list[int]) -> list[Seq]:
        """Admits waiting sequences by rank, while max_num_seqs, token budget and pages for all their tokens allow."""
        admitted: list[Seq] = []
        if self.batching == "static" and self.running:
            return admitted
        while self._waiting and len(self.running) < self.max_num_seqs and len(prefilling) + len(admitted) < budget:
            seq = self._waiting[0][1]
            if seq.state != "waiting":
                heapq.heappop(self._waiting)
                continue
            if not self._find_pages(seq, fresh):
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            seq.state = "running"
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    def _find_pages(self, seq: Seq, fresh: list[int]) -> bool:
        """Allocates pages for all tokens of a waiting sequence, cached ones first; keeps one page per running sequence free."""
        scoring = seq.prompt_logprobs is not None and seq.num_output == 0  # every position must be computed
        cached = [] if scoring else self.pool.match(seq.tokens, seq.request.salt)
        size = self.pool.block_size
        missing = -(-len(seq.tokens) // size) - len(cached)
        if missing + len(self.running) > self.pool.num_free:
            self.pool.free(cached)
            return False
        pages = self.pool.allocate(missing)
        assert pages is not None, "the pool had enough pages"
        fresh += pages
        seq.pages = cached + pages
        seq.num_computed = seq.drafted = len(cached) * size
        seq.published = len(cached)
        seq.key = self.pool.key_of(cached[-1]) if cached else root_key(seq.request.salt)
        if seq.num_preemptions == 0:
            seq.num_cached = seq.num_computed
            self.prefix_queries += seq.num_prompt
            self.prefix_hits += seq.num_computed
        return True

    def _chunks(self, seqs: list[Seq], budget: int) -> list[Work]:
        """Divides the budget: at most an equal part for each prompt; unused parts go to the others in order."""
        work = []
        wants = [len(seq.tokens) - seq.num_computed for seq in seqs]
        for position, (seq, want) in enumerate(zip(seqs, wants)):
            if budget <= 0:
                break
            others = len(seqs) - position
            share = max(1, budget // others) if others > 1 else budget
            rest = sum(wants[position + 1 :])
            count = min(want, max(share, budget - rest))
            work.append(Work(seq, seq.num_computed, count))
            budget -= count
        return work

    def advance(self, seq: Seq, computed: int, drafted: int | None = None) -> None:
        """After a step: `computed` tokens of the sequence are in its pages; full pages enter the prefix cache.

        With a draft model only pages that also hold the draft model's keys (`drafted` tokens) are entered.
        """
        seq.num_computed = computed
        if not self.pool.enable_prefix_caching:
            return
        size = self.pool.block_size
        known = computed if drafted is None else min(computed, drafted)
        while (seq.published + 1) * size <= known:
            start = seq.published * size
            seq.key = self.pool.publish(seq.pages[seq.published], seq.key, seq.tokens[start : start + size])
            seq.published += 1
