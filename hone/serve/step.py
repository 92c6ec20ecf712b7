"""What the device gets for one step, as flat arrays: all that a runner sees, so that a step can be sent to other ranks.

`StepBuilder` makes it of what the scheduler decided (`SchedulerOutput`). No request, tokenizer or page pool is in it: a
step can be recorded and replayed. A `ForwardBatch` is what one forward pass reads, `SamplingMetadata` how the next tokens are chosen;
`hone.serve.ranks.packing` puts all of it in one buffer. No array changes after it was made: steps share them.

Legend: T tokens of the step, one sequence's after another; S sequences; P pages of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated

import numpy as np

NULL_PAGE = 0
"""Page that pads block tables: never allocated, and zero (a captured pass writes its padding's keys there; nothing reads them)."""

Int64 = Annotated[np.ndarray, np.dtype(np.int64), 1]
Int64Table = Annotated[np.ndarray, np.dtype(np.int64), 2]
Int32 = Annotated[np.ndarray, np.dtype(np.int32), 1]
Int32Table = Annotated[np.ndarray, np.dtype(np.int32), 2]
Float64 = Annotated[np.ndarray, np.dtype(np.float64), 1]
Bool = Annotated[np.ndarray, np.dtype(np.bool_), 1]


class Arrays:
    """Base of dataclasses whose fields are arrays of one or two axes, or such dataclasses."""

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """(dotted name, array) of every array, in the order of the fields."""
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if isinstance(value, Arrays):
                yield from ((f"{one.name}.{name}", array) for name, array in value.arrays())
            else:
                yield one.name, value


@dataclass(eq=False)
class ForwardBatch(Arrays):
    """The tokens of one forward pass, and where their keys and values go.

    Sequence s has `ends[s] - lengths[s]` tokens in the cache and `lengths[s]` new ones; its pages are
    in `table[s]`, enough for both. Where a KV policy has dropped tokens, those in the cache are fewer than those before.
    """

    tokens: Int64
    """[T] 0 where the host does not know the token yet."""
    sources: Int64
    """[T] Place in the last launched step of the sequence whose sampled token this is; -1: `tokens` has it."""
    positions: Int64
    """[T] Place of each token in its sequence."""
    pages: Int64
    """[T] Page of each token."""
    offsets: Int64
    """[T] Place of each token in its page."""
    lengths: Int32
    """[S] New tokens of each sequence."""
    ends: Int32
    """[S] Tokens of each sequence, the new ones included."""
    table: Int32Table
    """[S, P] Pages of each sequence, padded with the null page."""
    adapter_slots: Int32
    """[T] Slot of the adapter of each token's sequence; -1: it has none."""

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        table: np.ndarray,
        block_size: int,
        sources: Sequence[int] | None = None,
        dropped: Sequence[int] | None = None,
        adapter_slots: Sequence[int] | None = None,
        reach: int = 0,
    ) -> ForwardBatch:
        """The batch of sequences with `lengths` new tokens each after the `starts` that are in the cache.

        `dropped` tokens of each were in the cache, too: they count in the positions. `adapter_slots` is of sequences.
        `table` is kept for `reach` tokens at least.
        """
        begins, counts = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        seqs = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        positions = begins[seqs] + np.arange(len(seqs)) - first
        ends = begins + counts
        width = -(-max(reach, int(ends.max(initial=0))) // block_size)
        return cls(
            tokens=np.asarray(tokens, dtype=np.int64),
            sources=np.full(len(seqs), -1) if sources is None else np.asarray(sources, dtype=np.int64),
            positions=positions if dropped is None else positions + np.asarray(dropped, dtype=np.int64)[seqs],
            pages=table[seqs, positions // block_size].astype(np.int64),
            offsets=positions % block_size,
            lengths=counts.astype(np.int32),
            ends=ends.astype(np.int32),
            table=np.ascontiguousarray(table[:, :width], dtype=np.int32),
            adapter_slots=np.full(len(seqs), -1, dtype=np.int32)
            if adapter_slots is None
            else np.asarray(adapter_slots, dtype=np.int32)[seqs],
        )

    def next(
        self,
        tokens: Sequence[int],
        sources: Sequence[int],
        starts: Sequence[int],
        table: np.ndarray | None,
        block_size: int,
        dropped: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """The same sequences with one new token each, after `starts` in the cache; `table` None when none begins a page.

        For a batch that has one new token of each sequence, too: it runs before every decode step.
        """
        begins = np.array(starts, dtype=np.int64)
        pages = self.pages if table is None else table[np.arange(len(table)), begins // block_size].astype(np.int64)
        return ForwardBatch(
            tokens=np.array(tokens, dtype=np.int64),
            sources=np.array(sources, dtype=np.int64),
            positions=begins if dropped is None else begins + np.array(dropped, dtype=np.int64),
            pages=pages,
            offsets=begins % block_size,
            lengths=self.lengths,
            ends=(begins + 1).astype(np.int32),
            table=self.table if table is None else table,
            adapter_slots=self.adapter_slots,
        )

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    @cached_property
    def any_adapters(self) -> bool:
        """Whether a sequence has an adapter."""
        return bool((self.adapter_slots >= 0).any())

    def last_indices(self) -> np.ndarray:
        """[S] Index of each sequence's last token among the T."""
        return np.cumsum(self.lengths, dtype=np.int64) - 1


@dataclass(eq=False)
class SamplingMetadata(Arrays):
    """How the next token of each of S sequences is chosen: parameters as arrays, lists as spans of shared arrays."""

    temperature: Float64
    top_p: Float64
    min_p: Float64
    presence_penalty: Float64
    frequency_penalty: Float64
    repetition_penalty: Float64
    top_k: Int64
    slot: Int64
    """Row of the runner's table of token counts, for penalties; -1: none is needed."""
    logprobs: Int64
    """Alternatives to report; -1: not even the token's own log-probability."""
    seed: Int64
    """64 bits."""
    position: Int64
    """Place of the token to choose in its sequence."""
    banned_below: Int64
    """Position from which the sequence may end."""
    spans: Int64Table
    """[S, 7] Begin and end in `banned`, in `bias_tokens`, and in `history`, then where the output begins in `history`."""
    banned: Int64
    """Tokens that would end the sequence."""
    bias_tokens: Int64
    bias_values: Float64
    history: Int64
    """Prompt and output of sequences with penalties whose slot is new to them; later steps count what they sample."""
    mask_row: Int64
    """[S] The sequence's row in the step's masks of allowed tokens, which come later (`Runner.launch`); -1: it has none."""

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, index: np.ndarray | Sequence[int], ahead: np.ndarray | int = 0) -> SamplingMetadata:
        """The entries at `index` (one may come several times), each for the token `ahead` places later."""
        index = np.asarray(index, dtype=np.int64)
        own = {name: getattr(self, name)[index] for name in _OWN}
        return replace(self, **{**own, "position": own["position"] + ahead})

    def later(self) -> SamplingMetadata:
        """The same parameters for the token one position later; only where none depends on earlier tokens."""
        assert not self.any_touched, "lists of tokens change with every token"
        later = copy(self)  # with what was derived: greedy, plain, touched
        later.position = self.position + 1
        return later

    @cached_property
    def greedy(self) -> np.ndarray:
        """bool [S]: takes the most likely token."""
        return self.temperature == 0

    @cached_property
    def plain(self) -> bool:
        """Whether every sequence takes the most likely token of untouched logits and asks for no log-probability."""
        return bool(self.greedy.all() and (self.logprobs < 0).all() and not self.any_touched)

    @cached_property
    def any_logprobs(self) -> bool:
        return bool((self.logprobs >= 0).any())

    @cached_property
    def any_filters(self) -> bool:
        """Whether a sequence that draws keeps only some tokens."""
        return bool((((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)) & ~self.greedy).any())

    @cached_property
    def any_touched(self) -> bool:
        return bool(self.touched.any())

    @cached_property
    def touched(self) -> np.ndarray:
        """bool [S]: penalties, biases, bans or masks change the logits."""
        return self.penalized | self.biased | self.banning | self.masked

    @property
    def penalized(self) -> np.ndarray:
        """bool [S]: logits depend on the tokens before."""
        return (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)

    @property
    def banning(self) -> np.ndarray:
        """bool [S]: some tokens may not be chosen yet."""
        return (self.spans[:, 1] > self.spans[:, 0]) & (self.position < self.banned_below)

    @property
    def masked(self) -> np.ndarray:
        """bool [S]: a mask says which tokens may be chosen."""
        return self.mask_row >= 0

    @property
    def biased(self) -> np.ndarray:
        """bool [S]: constants are added to some logits."""
        return self.spans[:, 3] > self.spans[:, 2]


_SHARED = ("banned", "bias_tokens", "bias_values", "history")
_OWN = tuple(one.name for one in fields(SamplingMetadata) if one.name not in _SHARED)


@dataclass(eq=False)
class StepInput(Arrays):
    """The whole input of a step. Guesses that the draft model makes during the step are token 0 in `batch.tokens`."""

    batch: ForwardBatch
    sampling: SamplingMetadata
    samples: Bool
    """[S] Whether the step samples the sequence's next token (False: its prompt is not yet computed to the end)."""
    num_guesses: Int32
    """[S] Of a sequence's tokens, the last ones that are guesses."""
    room: Int32
    """[S] Tokens after its last one for which a sequence has pages; 0 where it guesses nothing."""
    draft_starts: Int32
    """[S] Tokens whose keys are in the draft model's cache."""
    draft_lengths: Int32
    """[S] Tokens that the draft model reads before it guesses."""
    draft_tokens: Int64
    """Those tokens, one sequence's after another; empty when no draft model guesses."""
    score_counts: Int64
    """[S] Alternatives to report beside each prompt token's log-probability; -1: prompts are not scored."""
    next_tokens: Int64
    """[S] The prompt token after the step's last one, -1 where there is none."""
    pooling: Int64
    """[S] What to keep of the hidden states of the sequence's tokens: 0 nothing, 1 their sum, 2 the last one."""
    new_pages: Int64
    """Pages that were allocated since the last step, to be wiped before this one."""

    def next(self, batch: ForwardBatch, new_pages: Sequence[int]) -> StepInput:
        """The step of the same sequences with one more token each, where no choice depends on earlier tokens."""
        step = copy(self)  # with what was derived: sampled, scored
        step.batch, step.sampling = batch, self.sampling.later()
        step.new_pages = np.array(new_pages, dtype=np.int64)
        return step

    @property
    def num_seqs(self) -> int:
        return self.batch.num_seqs

    @cached_property
    def sampled(self) -> list[int]:
        """Indices of the sequences whose next token the step samples."""
        return np.flatnonzero(self.samples).tolist()

    @cached_property
    def scored(self) -> list[int]:
        """Places of the sequences whose prompts are scored."""
        return np.flatnonzero(self.score_counts >= 0).tolist()

    @cached_property
    def any_guesses(self) -> bool:
        return bool(self.num_guesses.any())

    def part(self, first: int, last: int) -> StepInput:
        """The step of the sequences `first` ... `last` - 1 alone, without pages to wipe."""
        batch, seqs = self.batch, slice(first, last)
        begins = np.concatenate(([0], np.cumsum(batch.lengths, dtype=np.int64)))
        reads = np.concatenate(([0], np.cumsum(self.draft_lengths, dtype=np.int64)))
        flat = slice(int(begins[first]), int(begins[last]))
        own = {
            name: getattr(batch, name)[flat]
            for name in ("tokens", "sources", "positions", "pages", "offsets", "adapter_slots")
        }
        own |= {name: getattr(batch, name)[seqs] for name in ("lengths", "ends", "table")}
        each = (
            "samples",
            "num_guesses",
            "room",
            "draft_starts",
            "draft_lengths",
            "score_counts",
            "next_tokens",
            "pooling",
        )
        return replace(
            self,
            batch=ForwardBatch(**own),
            sampling=self.sampling.take(range(first, last)),
            draft_tokens=self.draft_tokens[int(reads[first]) : int(reads[last])],
            new_pages=self.new_pages[:0],
            **{name: getattr(self, name)[seqs] for name in each},
        )
