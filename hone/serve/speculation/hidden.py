"""Drafters that guess from the model's own hidden states, when a step has computed them: what Medusa's and EAGLE's have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from hone.serve.speculation.drafter import Drafter, Proposer

if TYPE_CHECKING:
    from hone.serve.sequence import ScheduledSeq


class HiddenDrafter(Drafter):
    """Base of the drafters that are heads beside the model, in a folder of their own (`engine.draft`)."""

    needs: ClassVar[frozenset[str]] = frozenset({"heads"})

    num_rounds: int | None = Field(
        None,
        ge=1,
        le=32,
        description="Rounds of verifying and guessing that a GPU runs before the host reads their tokens. "
        "By default as many as take about 6 ms; 1 while requests wait.",
    )

    tree_size: int | None = Field(
        None,
        ge=1,
        le=62,
        description="Guesses that a GPU verifies at once: a tree, several choices of a place, of which num_tokens are a chain; fewer with "
        "many sequences. By default the chain alone.",
    )

    @model_validator(mode="after")
    def _holds_the_chain(self) -> Self:
        if self.tree_size is not None and self.tree_size < self.num_tokens:
            raise ValueError(
                f"tree_size {self.tree_size} is less than num_tokens {self.num_tokens}, which are its chain"
            )
        return self


class HiddenProposer(Proposer):
    """Proposes what the last step that a sequence was in has left for it."""

    def propose(self, scheduled: Sequence[ScheduledSeq]) -> None:
        for item in scheduled:
            if item.lookahead:
                item.guesses = item.seq.guesses[: item.lookahead]
                item.num_guesses = len(item.guesses)
