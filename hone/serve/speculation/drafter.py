"""The slot `drafter` of speculative decoding: it guesses tokens ahead, which one pass of the model verifies (`verification`).

A drafter has two parts: a `Proposer` beside the scheduler, which takes sequences, and, if it computes, one beside the model: a
`Guesser`, which takes a `StepInput` only and guesses in the step that verifies, or a `HiddenGuesser`, which takes a pass that has
run (`Passed`) and guesses for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import Field

from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder
    from hone.serve.paging.cache import KVCache
    from hone.serve.sampler import Sampler
    from hone.serve.sequence import ScheduledSeq
    from hone.serve.speculation.passes import Verified
    from hone.serve.step import ForwardBatch, StepInput


@dataclass(frozen=True)
class DraftSetting:
    """The arguments of `Drafter.open`. `draft` is the draft model, given exactly when "draft" is among its `needs`."""

    model: Decoder
    draft: Decoder | None
    sampler: Sampler
    num_pages: int
    block_size: int
    max_num_batched_tokens: int
    cache_dtype: Any
    """Dtype of the draft model's cache; None for that of its weights."""
    device: Any
    max_model_len: int | None = None
    """The longest sequence that the engine serves."""
    heads: Any = None
    """Draft heads (`hone.model.drafters`), given exactly when "heads" is among the drafter's `needs`."""
    max_num_seqs: int = 1
    """The most sequences of a step."""


class Drafter(Technique):
    """Base of the slot: the number of tokens to guess ahead, and the most sequences for which to guess."""

    num_tokens: int = Field(4, ge=1, le=32, description="Tokens guessed ahead.")
    max_num_seqs: int = Field(
        32, ge=1, description="Guess only while at most this many sequences decode: with more, steps are compute-bound."
    )

    def open(self, setting: DraftSetting) -> tuple[Proposer, Guesser | HiddenGuesser | None]:
        """The two parts for one engine; the `Guesser` is None for a drafter that needs no computation beside the model."""
        raise NotImplementedError


@dataclass
class Guess:
    """Tokens guessed after a sequence's last one, drawn from `probs` [len(tokens), V]; None when not drawn."""

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None


class Proposer:
    """A drafter's part beside the scheduler. By default it keeps no state and no pages."""

    uses_pages: bool = False
    """Whether its guesser keeps a cache under the sequences' page numbers (with `Seq.drafted` tokens of each)."""

    def propose(self, scheduled: Sequence[ScheduledSeq]) -> None:
        """Sets `num_guesses` (at most `lookahead`) and `guesses`, or the draft model's input instead of the latter."""
        raise NotImplementedError

    def settle(self, item: ScheduledSeq, num_kept: int) -> None:
        """Called after a successful step: the first `num_kept` of the item's guesses were accepted."""


class Guesser(Protocol):
    """A drafter's part beside the model."""

    cache: KVCache
    """Its own cache, under the model's page numbers."""

    def guess(self, step: StepInput) -> list[Guess]:
        """A guess of `num_guesses` tokens for each sequence of the step."""
        ...


@dataclass
class Passed:
    """A pass of the model that has run: what is known of it when its drafter guesses on.

    `batch` has its T tokens, guesses included. Of its sequences those at `sampled` got tokens: `kept` guesses were accepted, and
    `last` is the token after these.
    """

    step: StepInput
    batch: ForwardBatch
    x: Tensor
    """[T, D] hidden states after the last layer."""
    taps: dict[int, Tensor | None]
    """[T, D] hidden states after the layers that the guesser asked for."""
    sampled: list[int]
    kept: list[int]
    last: list[int]

    def rows(self) -> np.ndarray:
        """[len(sampled)] The place among the T tokens of the last accepted one of each sequence that sampled."""
        ends = self.batch.last_indices()[self.sampled] - self.step.num_guesses[self.sampled]
        return ends + np.asarray(self.kept, dtype=np.int64)


class HiddenGuesser(Protocol):
    """Such a drafter's part beside the model."""

    cache: KVCache | None
    """Its own cache, under the model's page numbers; None: it stores nothing."""
    taps: tuple[int, ...]
    """The layers, from 0, after which it reads hidden states."""
    branches: bool
    """Whether its choices of a place hold behind every choice of the places before, not behind the first ones alone."""

    def guess_on(self, passed: Passed) -> list[list[int]]:
        """Guesses of the tokens that follow `last`, for each of `sampled`."""
        ...

    def read_on(self, passed: Passed) -> None:
        """Reads a pass as `guess_on` does, where guesses come later: in a round (`speculation.rounds`)."""
        ...

    def guess_in_round(self, verified: Verified) -> Tensor:
        """int64 [k, S, choices] Guesses of the tokens that follow, in a captured round. Launches only: nothing may wait for the device."""
        ...
