"""Chooses the sequences of the next step: all that decode, then prompts in chunks with the rest of the token budget.

Continuous batching: Yu et al. 2022 (Orca, OSDI). Chunked prefill beside decode: Agrawal et al. 2023, arXiv:2308.16369.
When no page is free, the newest sequence of the lowest priority is preempted by recomputation: it frees its pages and
starts again later, often with a part of its tokens still in the prefix cache.

    add -> waiting -- _admit --> running --> finish
              ^                     |
              +------ preempt ------+

A step may be scheduled before the tokens of the last one are known: a sequence then has tokens in flight, which count in
its length (`Seq.length`) but are not in `Seq.tokens` yet.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from hone.cost.serve.schedule import divided
from hone.serve.adapters.registry import Adapters
from hone.serve.paging.fill import PageFill
from hone.serve.paging.manager import PageManager
from hone.serve.sequence import ScheduledSeq, SchedulerOutput, Seq

_MOST_PASSED = 32
"""Sequences with adapters that may begin before one that waits for a slot: then slots fall free until it has one."""


class Scheduler:
    """Sequences that wait and run. `pages` gives them pages of the KV cache.

    `batching` "static" and "dynamic" are the baselines that continuous batching is measured against: a batch runs until all
    its sequences are done before new ones start. Static starts with those that wait; dynamic waits until they are
    `max_num_seqs`, or until the oldest has waited `max_delay_s`. Up to `lookahead` guesses follow a sequence's token, of which
    at most `depth` are kept, while at most `lookahead_seqs` sequences decode; where `rounds` of guessing follow one another on the device, it gets pages for the tokens
    of all of them, up to `longest`, if there are enough. With `num_stages` pipeline stages a step has that part of the decoding
    sequences, none with a token in flight, so that as many steps are under way, one a stage. Sequences run with at most as
    many `adapters` as there are slots.
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        max_num_seqs: int,
        batching: Literal["continuous", "dynamic", "static"] = "continuous",
        max_delay_s: float = 0.0,
        lookahead: int = 0,
        depth: int = 0,
        lookahead_seqs: int = 0,
        rounds: int = 0,
        longest: int = 0,
        num_stages: int = 1,
        adapters: Adapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = pages.max_num_batched_tokens
        self.batching = batching
        self.max_delay_s = max_delay_s
        self.lookahead, self.depth = lookahead, depth
        self.lookahead_seqs = lookahead_seqs
        self.rounds, self.longest = rounds, longest
        self.num_stages = num_stages
        self.adapters = adapters
        self._clock = clock
        self.running: list[Seq] = []  # the last takes the place of one that leaves, so that few change their places
        self._waiting: list[tuple[tuple[int, int], Seq]] = []  # a heap; aborted ones are skipped at its top
        self.num_waiting = 0
        self.num_preemptions = 0
        self.fill = PageFill()

    def add(self, seq: Seq) -> None:
        seq.state = "waiting"
        seq.waits_since = self._clock()
        heapq.heappush(self._waiting, (seq.rank, seq))
        self.num_waiting += 1

    def waiting(self) -> Iterator[Seq]:
        """Waiting sequences, in no particular order."""
        return (seq for _, seq in self._waiting if seq.state == "waiting")

    def schedule(self) -> SchedulerOutput:
        """The next step: decoding sequences first, then prompts, by rank."""
        scheduled = self._decode()
        budget = self.max_num_batched_tokens - sum(item.count + item.lookahead for item in scheduled)
        prefilling = sorted((seq for seq in self.running if not seq.decoding), key=lambda seq: seq.rank)
        prefilling += self._admit(budget - len(prefilling))
        for seq in prefilling:
            self.pages.top_up(seq)
        scheduled += self._chunks(prefilling, budget)
        if not scheduled and prefilling and not any(seq.num_in_flight for seq in self.running):
            # Each has used its pages up, and those that it dropped are shared with others.
            self.preempt(max(self.running, key=lambda seq: seq.rank))
            return self.schedule()
        if scheduled:
            self.fill.step(self.pages.pool, self.running)
        return SchedulerOutput(scheduled, self.pages.take_new_pages())

    def _decode(self) -> list[ScheduledSeq]:
        """One token for every decoding sequence, by rank; the last may be preempted to free pages."""
        scheduled = []
        seqs = [seq for seq in self.running if seq.decoding]
        if any(seq.request.priority for seq in seqs):
            seqs.sort(key=lambda seq: seq.rank)
        if self.num_stages > 1:
            share = -(-len(seqs) // self.num_stages)
            seqs = [seq for seq in seqs if not seq.num_in_flight][:share]
        pays = len(seqs) <= self.lookahead_seqs and len(seqs) * (self.lookahead + 1) <= self.max_num_batched_tokens
        lookahead = self.lookahead if pays else 0
        rounds = self._rounds(seqs) if lookahead else 0
        append = self.pages.append
        for seq in seqs:
            if seq.state != "running":
                continue  # preempted by an earlier sequence
            length = seq.length
            if seq.num_in_flight and length >= seq.max_tokens:
                continue  # the token in flight is its last
            room = 0
            if rounds and seq.speculates:
                fitting = min(rounds, (self.longest - length - lookahead) // (self.depth + 1))
                room = fitting * (self.depth + 1) + lookahead if fitting > 0 else 0
            if room and not append(seq, length + room):
                room = 0
            extra = max(0, min(lookahead, seq.max_tokens - length - 1)) if seq.speculates else 0
            if extra and not append(seq, length + extra):
                extra = 0
            while not append(seq, length):
                victim = max(self.running, key=lambda other: other.rank)
                self.preempt(victim)
                scheduled = [item for item in scheduled if item.seq is not victim]
                if victim is seq:
                    break
            if seq.state == "running":
                scheduled.append(ScheduledSeq(seq, seq.num_computed, 1, True, extra, room))
        return scheduled

    def _rounds(self, seqs: Sequence[Seq]) -> int:
        """Rounds of guessing for one step: one while others wait, and at the end fewer, because a round brings one token or more."""
        most = max((seq.max_tokens - seq.length for seq in seqs), default=0)
        rounds = min(1 if self.num_waiting else self.rounds, self.rounds, most // 2 + 1)
        pool = self.pages.pool
        needed = (rounds * (self.depth + 1) + self.lookahead + 1) // pool.block_size + 1
        return rounds if needed * len(seqs) <= pool.num_free else min(rounds, 1)

    def _admit(self, budget: int) -> list[Seq]:
        """Admits up to `budget` waiting sequences by rank, while max_num_seqs and pages for all their tokens allow.

        One page stays free for every running sequence. One whose prefix is being computed by another waits for it: it then
        finds those pages in the cache.
        """
        admitted: list[Seq] = []
        if self.batching != "continuous" and (self.running or self.delay_s > 0):
            return admitted
        later: list[Seq] = []
        unslotted: list[Seq] = []
        while self._waiting and len(self.running) < self.max_num_seqs and len(admitted) < budget:
            seq = self._waiting[0][1]
            if seq.state != "waiting":
                heapq.heappop(self._waiting)
                continue
            if seq.num_in_flight or len(later) >= self.max_num_seqs:
                break  # preempted, and its last token is not known yet
            if self.batching == "continuous" and self.pages.is_coming(seq):
                later.append(seq)
                heapq.heappop(self._waiting)
                continue
            if seq.adapter is not None and not self._has_slot(seq, unslotted):
                unslotted.append(seq)
                later.append(seq)
                heapq.heappop(self._waiting)
                continue
            if not self.pages.allocate(seq, reserve=len(self.running)):
                break
            if seq.adapter is not None and self.adapters is not None:
                seq.adapter_slot = self.adapters.take(seq.adapter)
                for other in unslotted:
                    other.num_passed += 1
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            seq.state = "running"
            self.running.append(seq)
            admitted.append(seq)
        for seq in later:
            heapq.heappush(self._waiting, (seq.rank, seq))
        return admitted

    def _has_slot(self, seq: Seq, before: Sequence[Seq]) -> bool:
        """Whether a sequence with an adapter may start; not while one `before` it has waited long for a slot, that one becomes free."""
        assert self.adapters is not None and seq.adapter is not None, "it has an adapter"
        return self.adapters.can_run(seq.adapter) and all(other.num_passed < _MOST_PASSED for other in before)

    def _chunks(self, seqs: Sequence[Seq], budget: int) -> list[ScheduledSeq]:
        """Divides the budget in order: a prompt gets at most half of the rest while others wait, and what they leave."""
        counts = divided([self.pages.num_computable(seq) for seq in seqs], budget)
        return [
            ScheduledSeq(seq, start, count, samples=start + count == seq.length)
            for seq, start, count in zip(seqs, [seq.num_computed for seq in seqs], counts)
            if count
        ]

    def launched(self, scheduled: Sequence[ScheduledSeq]) -> None:
        """The step is on its way: later ones find its keys and values in the pages, in the order of launches."""
        for item in scheduled:
            seq = item.seq
            seq.num_in_flight += item.samples
            seq.num_computed = item.start + item.count
            if seq.num_computed >= seq.page_end:
                self.pages.advance(seq, seq.num_computed)

    def preempt(self, seq: Seq) -> None:
        """Moves a running sequence to the waiting ones; it is computed again later, except for tokens still cached."""
        self._leave(seq)
        self.pages.deallocate(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.add(seq)

    def finish(self, seq: Seq) -> None:
        """Removes a waiting or running sequence, and frees its pages."""
        if seq.state == "waiting":
            self.num_waiting -= 1
        elif seq.state == "running":
            self._leave(seq)
        seq.state = "done"
        self.pages.deallocate(seq)
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.leave(seq.adapter)

    def unreadable(self) -> list[tuple[Seq, str]]:
        """Waiting sequences whose adapter cannot be read from disk any more, with the error."""
        failed = dict(self.adapters.poll()) if self.adapters is not None else {}
        return [(seq, failed[seq.adapter]) for seq in self.waiting() if seq.adapter in failed] if failed else []

    def _leave(self, seq: Seq) -> None:
        """Takes a sequence out of the running ones."""
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.release(seq.adapter)
            seq.adapter_slot = -1
        index, last = self.running.index(seq), self.running.pop()
        if last is not seq:
            self.running[index] = last

    @property
    def delay_s(self) -> float:
        """Seconds for which dynamic batching still waits before it starts the waiting sequences."""
        if self.batching != "dynamic" or self.num_waiting >= self.max_num_seqs or self.running:
            return 0.0
        oldest = min((seq.waits_since for seq in self.waiting()), default=-float("inf"))
        return max(0.0, oldest + self.max_delay_s - self._clock())
