"""Drafters that guess from the model's own hidden states, when a step has computed them: what Medusa's and EAGLE's have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hone.serve.speculation.drafter import Drafter, Proposer

if TYPE_CHECKING:
    from hone.serve.sequence import ScheduledSeq


class HiddenDrafter(Drafter):
    """Base of the drafters that are heads beside the model, in a folder of their own (`engine.draft`)."""

    needs: ClassVar[frozenset[str]] = frozenset({"heads"})


class HiddenProposer(Proposer):
    """Proposes what the last step that a sequence was in has left for it."""

    def propose(self, scheduled: Sequence[ScheduledSeq]) -> None:
        for item in scheduled:
            if item.lookahead:
                item.guesses = item.seq.guesses[: item.lookahead]
                item.num_guesses = len(item.guesses)
