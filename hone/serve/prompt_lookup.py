"""Drafter: what followed the last few tokens when they stood in the text before; costs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from pydantic import Field

from hone.serve.speculate import Drafter, Guess

if TYPE_CHECKING:
    from hone.model.decoder import Decoder
    from hone.serve.sampler import Sampler
    from hone.serve.scheduler import Row, Work


class PromptLookup(Drafter):
    """Guess that text repeats itself: continue the latest earlier place with the same last n tokens. LLMA, arXiv:2304.04487."""

    paper: ClassVar[str] = "arXiv:2304.04487"

    max_ngram: int = Field(4, ge=1, description="Longest run of tokens to look up.")
    min_ngram: int = Field(2, ge=1, description="Shortest run of tokens that counts as a repetition.")

    def open(
        self,
        model: Decoder,
        draft: Decoder | None,
        sampler: Sampler,
        num_pages: int,
        page_size: int,
        token_budget: int,
        device: Any,
    ) -> LookupProposer:
        return LookupProposer(self.min_ngram, max(self.min_ngram, self.max_ngram))


class LookupProposer:
    """Keeps, per row, the latest place after every run of tokens seen."""

    uses_pages = False
    cache_bytes = 0

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._places: WeakKeyDictionary[Row, tuple[dict[tuple[int, ...], int], list[int]]] = WeakKeyDictionary()

    def propose(self, work: Sequence[Work]) -> list[Guess]:
        return [Guess(self._look(item.row, item.lookahead) if item.lookahead else []) for item in work]

    def _look(self, row: Row, most: int) -> list[int]:
        tokens = row.tokens
        places, seen = self._places.setdefault(row, ({}, [1]))
        for end in range(seen[0], len(tokens)):  # runs that end before `end`, so never the last one itself
            for size in self._sizes:
                if size <= end:
                    places[tuple(tokens[end - size : end])] = end
        seen[0] = max(seen[0], len(tokens))
        for size in self._sizes:
            place = places.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None:
                return tokens[place : place + most]
        return []

    def settle(self, row: Row, length: int, num_guessed: int, num_kept: int) -> None:
        """Nothing to remember."""

    def wipe(self, pages: Sequence[int]) -> None:
        """No pages of its own."""
