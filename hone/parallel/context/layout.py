"""Which tokens of a sequence each rank of an axis holds, and which keys its queries attend to.

Legend: B batch, S the whole sequence's length, n ranks, s = S / n tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from hone.ops.attention.masks import CAUSAL, FULL, Mask, documents, since
from hone.ops.attention.masks import window as windowed
from hone.parallel.context.chunks import chunk_size


class Block(NamedTuple):
    """Attention of some of a rank's queries to some of the keys at hand, under a mask of their own."""

    queries: slice
    keys: slice
    mask: Mask


class Layout:
    """The division of sequences of `seq_len` tokens over `num_ranks` ranks, as rank `rank` sees it in one pass.

    zigzag: in 2 n chunks, of which rank r holds chunks r and 2 n - 1 - r, so that causal attention is equal work for all
    (the idea of striped attention, Brandon et al. 2023, arXiv:2311.09431, with two stripes a rank); else one chunk a rank.
    `document_ids` integer [B, S] are those of the whole sequences: a token attends within its run of equal ids. Masks are
    made once for all layers of the pass. Raises SpecError for a length that does not divide.
    """

    def __init__(
        self,
        seq_len: int,
        num_ranks: int,
        rank: int,
        *,
        zigzag: bool = True,
        document_ids: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.seq_len, self.num_ranks, self.rank, self.zigzag = seq_len, num_ranks, rank, zigzag
        self.chunk = chunk_size(seq_len, num_ranks, zigzag)
        self.device = torch.device(device) if document_ids is None else document_ids.device
        self.document_ids = document_ids
        self.begins: Tensor | None = None
        """int64 [B, S]: where the document of each token of the whole sequences begins."""
        if document_ids is not None:
            changed = torch.ones_like(document_ids, dtype=torch.bool)
            changed[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
            self.begins = torch.where(changed, torch.arange(seq_len, device=self.device), 0).cummax(-1).values
        self.places = self.places_of(rank)
        """int64 [s]: where this rank's tokens are in the sequence."""
        self._made: dict[Hashable, Mask] = {}

    def places_of(self, rank: int) -> Tensor:
        """int64 [s], rising: where the tokens of `rank` are in the sequence."""
        chunks = (rank, 2 * self.num_ranks - 1 - rank) if self.zigzag else (rank,)
        line = torch.arange(self.chunk, device=self.device)
        return torch.cat([line + chunk * self.chunk for chunk in chunks])

    def mine(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [B, S, ...]: [B, s, ...]."""
        return x.index_select(1, self.places.to(x.device))

    @property
    def positions(self) -> Tensor:
        """int64 [B or 1, s]: the distance of this rank's tokens from the start of their document."""
        return self.places[None] if self.begins is None else self.places - self.mine(self.begins)

    def whole(self, window: int | None = None) -> Mask:
        """The mask of the whole sequences."""
        window = self._limit(window)
        if self.document_ids is not None:
            ids = self.document_ids
            return self._once(("whole", window), lambda: documents(ids, window))
        return CAUSAL if window is None else windowed(window)

    def block(self, source: int, window: int | None = None) -> Block | None:
        """What this rank's queries attend to of the tokens of rank `source` (in their order there); None: nothing."""
        every, first, last = slice(None), slice(0, self.chunk), slice(self.chunk, None)
        if source == self.rank:
            queries, keys = every, every
        elif not self.zigzag:
            if source > self.rank:
                return None
            queries, keys = every, every
        elif source < self.rank:  # its first chunk is before both of ours, its last one after them
            queries, keys = every, first
        else:  # both of its chunks are between ours
            queries, keys = last, every
        own = source == self.rank
        begins = self._first(window)
        if begins is None:
            return Block(queries, keys, CAUSAL if own else FULL)

        def make() -> Mask:
            known = self.places_of(source)[keys]
            return since(torch.searchsorted(known, begins[:, queries].contiguous()), causal=own)

        return Block(queries, keys, self._once(("block", source, self._limit(window)), make))

    def gathered(self, window: int | None = None) -> list[Block]:
        """What each chunk of this rank's queries attends to of all keys in the order of the sequence."""
        found, begins = [], self._first(window)
        for number in range(len(self.places) // self.chunk):
            queries = slice(number * self.chunk, (number + 1) * self.chunk)
            stop = int((2 * self.num_ranks - self.rank if number else self.rank + 1) * self.chunk)
            mask = CAUSAL
            if begins is not None:
                first = begins[:, queries]
                mask = self._once(("gathered", number, self._limit(window)), lambda first=first: since(first))
            found.append(Block(queries, slice(0, stop), mask))
        return found

    def _limit(self, window: int | None) -> int | None:
        return None if window is None or window >= self.seq_len else window

    def _first(self, window: int | None) -> Tensor | None:
        """int64 [B or 1, s]: the place of the first key that each of this rank's queries attends to; None: the sequence's first."""
        window, begins = self._limit(window), None if self.begins is None else self.mine(self.begins)
        if window is None:
            return begins
        reach = (self.places - (window - 1)).clamp(min=0)[None]
        return reach if begins is None else torch.maximum(begins, reach)

    def _once(self, key: Hashable, make: Callable[[], Mask]) -> Mask:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
