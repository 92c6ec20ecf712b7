"""Drafter: the tokens that followed the last few tokens at their latest earlier occurrence; needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from pydantic import Field

from hone.serve.speculation.drafter import Drafter, DraftSetting, Proposer

if TYPE_CHECKING:
    from hone.serve.sequence import ScheduledSeq, Seq


class PromptLookup(Drafter):
    """Guess the continuation of the latest earlier occurrence of the last n tokens. LLMA, arXiv:2304.04487."""

    paper: ClassVar[str] = "arXiv:2304.04487"

    max_ngram: int = Field(4, ge=1, description="Longest run of tokens to look up.")
    min_ngram: int = Field(2, ge=1, description="Shortest run of tokens that counts as a repetition.")

    def open(self, setting: DraftSetting) -> tuple[LookupProposer, None]:
        return LookupProposer(self.min_ngram, max(self.min_ngram, self.max_ngram)), None


class LookupProposer(Proposer):
    """Stores, per sequence, the position after the latest occurrence of every run of tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._positions: WeakKeyDictionary[Seq, tuple[dict[tuple[int, ...], int], list[int]]] = WeakKeyDictionary()

    def propose(self, scheduled: Sequence[ScheduledSeq]) -> None:
        for item in scheduled:
            if item.lookahead:
                item.guesses = self._look(item.seq, item.lookahead)
                item.num_guesses = len(item.guesses)

    def _look(self, seq: Seq, most: int) -> list[int]:
        tokens = seq.tokens
        positions, seen = self._positions.setdefault(seq, ({}, [1]))
        for end in range(seen[0], len(tokens)):  # runs that end before `end`, so never the last one itself
            for size in self._sizes:
                if size <= end:
                    positions[tuple(tokens[end - size : end])] = end
        seen[0] = max(seen[0], len(tokens))
        for size in self._sizes:
            position = positions.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if position is not None:
                return tokens[position : position + most]
        return []
