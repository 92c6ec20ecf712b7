"""Makes of what the scheduler decided what the device gets: nothing below reads the scheduler's sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hone.serve.sampling import Slots, sampling_of
from hone.serve.sequence import ScheduledSeq, SchedulerOutput, Seq
from hone.serve.step import NULL_PAGE, ForwardBatch, StepInput

_POOLING = {None: 0, "mean": 1, "last": 2}


class StepBuilder:
    """Builds steps. It keeps the block tables of the last one, since from step to step most sequences only grow."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._known: list[tuple[Sequence[int], int]] = []
        """By place in the step: the page list that the table holds, and how many of its pages."""
        self._last: tuple[list[Seq], list[Sequence[int]], StepInput, list[int]] | None = None
        """Sequences, their page lists, the input of the last step and its adapters' slots, when `_decoded` can go on from it."""
        self._slots = Slots()

    def build(self, output: SchedulerOutput) -> StepInput:
        """The input of a step. Changes no sequence."""
        seqs, pages = [item.seq for item in output.seqs], [item.seq.pages for item in output.seqs]
        slots = [seq.adapter_slot for seq in seqs]
        decoding = all(
            item.samples
            and item.count == 1
            and item.start >= item.seq.num_prompt
            and not (item.num_guesses or item.draft_count or item.room)
            for item in output.seqs
        )
        if decoding and self._last is not None and (*self._last[:2], self._last[3]) == (seqs, pages, slots):
            step = self._decoded(output, self._last[2])
        else:
            step = self._built(output)
        plain = decoding and not step.sampling.any_touched
        self._last = (seqs, pages, step, slots) if plain else None
        return step

    def build_possible(
        self, output: SchedulerOutput
    ) -> tuple[StepInput, list[ScheduledSeq], list[tuple[ScheduledSeq, str]]]:
        """The step's input, the sequences that it contains, and those left out with the error in their state."""
        try:
            return self.build(output), output.seqs, []
        except Exception:
            broken = [(item, error) for item in output.seqs if (error := self._mistake(item)) is not None]
            if not broken:
                raise
        bad = [item for item, _ in broken]
        good = [item for item in output.seqs if item not in bad]
        return self.build(SchedulerOutput(good, output.new_pages)), good, broken

    def _mistake(self, item: ScheduledSeq) -> str | None:
        """The error of building a step of this item alone, None without one."""
        try:
            StepBuilder(self._block_size).build(SchedulerOutput([item]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _decoded(self, output: SchedulerOutput, last: StepInput) -> StepInput:
        """The next step of the same sequences, each with the one token it got: most of the last input still holds."""
        seqs, size, table = output.seqs, self._block_size, None
        starts = [item.start - item.seq.num_dropped for item in seqs]
        if any(start % size == 0 for start in starts):  # a sequence begins a page
            table = self._tables([item.seq.pages for item in seqs], [start + 1 for start in starts])
        tokens, sources = _last_tokens(seqs)
        return last.next(last.batch.next(tokens, sources, starts, table, size, _dropped(seqs)), output.new_pages)

    def _built(self, output: SchedulerOutput) -> StepInput:
        seqs = output.seqs
        tokens: list[int] = []
        for item in seqs:
            end = item.start + item.count
            tokens += item.seq.tokens[item.start : end]
            if end > len(item.seq.tokens):
                tokens.append(0)  # in flight: the device has it
            if item.num_guesses:
                tokens += item.guesses or [0] * item.num_guesses
        starts = [item.start - item.seq.num_dropped for item in seqs]
        lengths = [item.count + item.num_guesses for item in seqs]
        guessing = any(item.num_guesses for item in seqs)
        rooms = [item.room or (item.lookahead if guessing else 0) for item in seqs]
        reaches = [a + max(b, 1 + room) for a, b, room in zip(starts, lengths, rooms)]
        table = self._tables([item.seq.pages for item in seqs], reaches)
        drafts = [item.seq.tokens[item.draft_start : item.draft_start + item.draft_count] for item in seqs]
        entries = [item.seq.sampling for item in seqs]
        self._slots.begin(entries)
        return StepInput(
            batch=ForwardBatch.of(
                tokens,
                starts,
                lengths,
                table,
                self._block_size,
                _sources(seqs, lengths),
                _dropped(seqs),
                [item.seq.adapter_slot for item in seqs],
                max(reaches, default=0),
            ),
            sampling=sampling_of(entries, [item.seq.length for item in seqs], self._slots),
            samples=np.array([item.samples for item in seqs], dtype=np.bool_),
            num_guesses=np.array([item.num_guesses for item in seqs], dtype=np.int32),
            room=np.array(rooms, dtype=np.int32),
            draft_starts=np.array([item.draft_start for item in seqs], dtype=np.int32),
            draft_lengths=np.array([item.draft_count for item in seqs], dtype=np.int32),
            draft_tokens=np.array([token for draft in drafts for token in draft], dtype=np.int64),
            score_counts=np.array([_score_count(item.seq) for item in seqs], dtype=np.int64),
            next_tokens=np.array([_next_token(item) for item in seqs], dtype=np.int64),
            pooling=np.array([_POOLING[item.seq.request.pooling] for item in seqs], dtype=np.int64),
            new_pages=np.array(output.new_pages, dtype=np.int64),
        )

    def _tables(self, pages: Sequence[Sequence[int]], ends: Sequence[int]) -> np.ndarray:
        """int32 [S, P], a copy: the pages of each sequence up to its `ends` tokens, then the null page."""
        used = [-(-end // self._block_size) for end in ends]
        widest, count = max(used, default=0), len(pages)
        if self._table.shape[0] < count or self._table.shape[1] < widest:
            grown = np.full(
                (max(count, self._table.shape[0]), max(2 * widest, self._table.shape[1])), NULL_PAGE, np.int32
            )
            grown[: self._table.shape[0], : self._table.shape[1]] = self._table
            self._known += [((), 0)] * (len(grown) - len(self._known))
            self._table = grown
        for index, (ids, needed) in enumerate(zip(pages, used)):
            known, num_known = self._known[index]
            if known is not ids or num_known != needed:  # a sequence's list of pages only ever grows
                self._table[index, :needed] = ids[:needed]
                self._table[index, needed:] = NULL_PAGE
                self._known[index] = ids, needed
        return self._table[:count, :widest].copy()


def _dropped(seqs: Sequence[ScheduledSeq]) -> list[int] | None:
    """Tokens of each sequence that its KV policy has dropped; None where no sequence lacks any."""
    dropped = [item.seq.num_dropped for item in seqs]
    return dropped if any(dropped) else None


def _score_count(seq: Seq) -> int:
    """Alternatives to report for its prompt's tokens; -1 when the prompt is not to be scored (any more)."""
    if seq.prompt_logprobs is None or seq.num_output or seq.num_in_flight:
        return -1
    return seq.request.params.prompt_logprobs or 0


def _next_token(item: ScheduledSeq) -> int:
    """The prompt token that follows the step's last one, -1 at the prompt's end."""
    end = item.start + item.count
    return item.seq.tokens[end] if end < item.seq.num_prompt else -1


def _last_tokens(seqs: Sequence[ScheduledSeq]) -> tuple[list[int], list[int]]:
    """The last token of each sequence, or 0 and its place in the last step when it is in flight."""
    if not any(item.seq.num_in_flight for item in seqs):
        return [item.seq.tokens[-1] for item in seqs], [-1] * len(seqs)
    tokens, sources = [], []
    for item in seqs:
        flying = item.seq.num_in_flight
        tokens.append(0 if flying else item.seq.tokens[-1])
        sources.append(item.seq.step_index if flying else -1)
    return tokens, sources


def _sources(seqs: Sequence[ScheduledSeq], lengths: Sequence[int]) -> np.ndarray:
    """int64 [T]: the place in the last step of a sequence whose last token is in flight, at that token; -1 elsewhere."""
    sources = np.full(sum(lengths), -1, dtype=np.int64)
    ends = np.cumsum(lengths)
    for index, item in enumerate(seqs):
        if item.seq.num_in_flight and item.samples:
            sources[ends[index] - 1] = item.seq.step_index
    return sources
