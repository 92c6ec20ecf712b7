"""Who runs in the next step: decode rows always, prefill in chunks with what is left of the token budget.

Continuous batching: Yu et al. 2022 (Orca, OSDI). Chunked prefill beside decode: Agrawal et al. 2023, arXiv:2308.16369.
A row that finds no page takes those of the least important newest row, which starts again later (preemption by
recomputation); what it had computed is often still in the prefix cache then.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hone.serve.detokenize import TextStream
from hone.serve.pages import PagePool, root_key
from hone.serve.request import Request, TokenLogprob
from hone.serve.sampler import Entry

State = Literal["waiting", "running", "done"]


@dataclass(eq=False)
class Row:
    """One request on its way: its tokens so far, and how much of them is in which pages."""

    request: Request
    arrival: int
    max_tokens: int  # total length at which it must end
    tokens: list[int] = field(default_factory=list)  # prompt and output
    num_prompt: int = 0
    state: State = "waiting"
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the pages
    num_cached: int = 0  # of the prompt, found in the prefix cache at first admission
    drafted: int = 0  # tokens whose keys and values are in the draft model's pages
    published: int = 0  # full pages made findable
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
        """Lower is served first."""
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
    """What a row does in this step: `count` tokens from `start` on; `lookahead` draft tokens may follow."""

    row: Row
    start: int
    count: int
    lookahead: int = 0

    @property
    def samples(self) -> bool:
        """True when the step brings the row's next token."""
        return self.start + self.count == len(self.row.tokens)


class Scheduler:
    """Rows waiting and running over one `PagePool`.

    `batching` "static" is the baseline that continuous batching is measured against: a batch runs until all its rows
    are done before new ones start.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        token_budget: int,
        batching: Literal["continuous", "static"] = "continuous",
        lookahead: int = 0,
        lookahead_rows: int = 0,
    ) -> None:
        self.pool = pool
        self.max_rows = max_rows
        self.token_budget = token_budget
        self.batching = batching
        self.lookahead = lookahead
        self.lookahead_rows = lookahead_rows
        self.running: list[Row] = []  # in order of admission
        self._waiting: list[tuple[tuple[int, int], Row]] = []  # a heap; aborted rows are skipped when they surface
        self.num_waiting = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, row: Row) -> None:
        row.state = "waiting"
        heapq.heappush(self._waiting, (row.rank, row))
        self.num_waiting += 1

    def finish(self, row: Row) -> list[int]:
        """Takes a row out, wherever it is; returns the pages that nobody can reach any more."""
        if row.state == "waiting":
            self.num_waiting -= 1
        elif row.state == "running":
            self.running.remove(row)
        row.state = "done"
        gone = self.pool.free(row.pages)
        row.pages = []
        return gone

    def waiting(self) -> Iterator[Row]:
        """Rows that wait, in no particular order."""
        return (row for _, row in self._waiting if row.state == "waiting")

    def schedule(self) -> tuple[list[Work], list[int]]:
        """The next step's work, decode rows first, and the pages newly given out (to be wiped before use)."""
        fresh: list[int] = []
        work = self._decode(fresh)
        budget = self.token_budget - sum(item.count + item.lookahead for item in work)
        prefilling = sorted((row for row in self.running if not row.decoding), key=lambda row: row.rank)
        prefilling += self._admit(budget, prefilling, fresh)
        return work + self._chunks(prefilling, budget), fresh

    def _decode(self, fresh: list[int]) -> list[Work]:
        """One token for every decoding row, the most important first; rows may be preempted to make room."""
        work = []
        rows = [row for row in self.running if row.decoding]
        if any(row.request.priority for row in rows):
            rows.sort(key=lambda row: row.rank)
        pays = len(rows) <= self.lookahead_rows and len(rows) * (self.lookahead + 1) <= self.token_budget
        lookahead = self.lookahead if pays else 0
        for row in rows:
            if row.state != "running":
                continue  # preempted for a row before it
            length = len(row.tokens)
            extra = max(0, min(lookahead, row.max_tokens - length - 1)) if row.speculates else 0
            if extra and not self._grow(row, length + extra, fresh):
                extra = 0
            while not self._grow(row, length, fresh):
                victim = max(self.running, key=lambda other: other.rank)
                self._preempt(victim, fresh)
                work = [item for item in work if item.row is not victim]
                if victim is row:
                    break
            if row.state == "running":
                work.append(Work(row, row.num_computed, 1, extra))
        return work

    def _grow(self, row: Row, length: int, fresh: list[int]) -> bool:
        """Pages for `length` tokens; False when there are not enough."""
        missing = -(-length // self.pool.page_size) - len(row.pages)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        row.pages += pages
        fresh += pages
        return True

    def _preempt(self, row: Row, fresh: list[int]) -> None:
        """Sends a running row back to wait; it will be computed again from the start, or from what is still cached."""
        self.running.remove(row)
        self.pool.free(row.pages)
        row.pages = []
        row.num_computed = row.drafted = 0
        row.num_preemptions += 1
        self.num_preemptions += 1
        self.add(row)

    def _admit(self, budget: int, prefilling: list[Row], fresh: list[int]) -> list[Row]:
        """Takes waiting rows in, in order of rank, as long as row places, budget and pages for all their tokens last."""
        admitted: list[Row] = []
        if self.batching == "static" and self.running:
            return admitted
        while self._waiting and len(self.running) < self.max_rows and len(prefilling) + len(admitted) < budget:
            row = self._waiting[0][1]
            if row.state != "waiting":
                heapq.heappop(self._waiting)
                continue
            if not self._find_pages(row, fresh):
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            row.state = "running"
            self.running.append(row)
            admitted.append(row)
        return admitted

    def _find_pages(self, row: Row, fresh: list[int]) -> bool:
        """Gives a waiting row pages for all its tokens, cached ones where there are; a page a running row stays spare."""
        scoring = row.prompt_logprobs is not None and row.num_output == 0  # every position must be computed
        cached = [] if scoring else self.pool.match(row.tokens, row.request.salt)
        size = self.pool.page_size
        missing = -(-len(row.tokens) // size) - len(cached)
        if missing + len(self.running) > self.pool.num_free:
            self.pool.free(cached)
            return False
        pages = self.pool.allocate(missing)
        assert pages is not None, "the pool promised enough pages"
        fresh += pages
        row.pages = cached + pages
        row.num_computed = row.drafted = len(cached) * size
        row.published = len(cached)
        row.key = self.pool.key_of(cached[-1]) if cached else root_key(row.request.salt)
        if row.num_preemptions == 0:
            row.num_cached = row.num_computed
            self.prefix_queries += row.num_prompt
            self.prefix_hits += row.num_computed
        return True

    def _chunks(self, rows: list[Row], budget: int) -> list[Work]:
        """Shares the budget out: no prompt takes more than its part while others want theirs, what is left goes in order."""
        work = []
        wants = [len(row.tokens) - row.num_computed for row in rows]
        for position, (row, want) in enumerate(zip(rows, wants)):
            if budget <= 0:
                break
            others = len(rows) - position
            share = max(1, budget // others) if others > 1 else budget
            rest = sum(wants[position + 1 :])
            count = min(want, max(share, budget - rest))
            work.append(Work(row, row.num_computed, count))
            budget -= count
        return work

    def advance(self, row: Row, computed: int, drafted: int | None = None) -> None:
        """After a step: `computed` tokens of the row are in its pages; full pages become findable.

        With a draft model a page counts only when the draft's keys are in it too (`drafted` tokens).
        """
        row.num_computed = computed
        if not self.pool.prefix_cache:
            return
        size = self.pool.page_size
        known = computed if drafted is None else min(computed, drafted)
        while (row.published + 1) * size <= known:
            start = row.published * size
            row.key = self.pool.publish(row.pages[row.published], row.key, row.tokens[start : start + size])
            row.published += 1
