"""Passes whose places are computed on the device: what a captured round reads, with no number of the host's in it.

Legend: S sequences, Q new tokens of each, P pages of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hone.model.context import Context
from hone.ops import sample
from hone.ops.paged.api import PagedPlan, plan_sequences
from hone.serve.paging.cache import KVCache
from hone.serve.paging.paged import Paged


class Places(NamedTuple):
    """Where tokens of a pass stand: in their sequences, and in pages (the null page's where a sequence only pads)."""

    positions: Tensor
    pages: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, positions: Tensor, rows: Tensor, table: Tensor, alive: Tensor, block_size: int) -> Places:
        """Of tokens at `positions` int64 [...] of the sequences `rows`, whose pages are in `table` [S, P]; `alive` is 1 or, for a pad, 0."""
        pages = table[rows, positions // block_size] * alive
        return cls(positions, pages, positions % block_size)

    def flat(self) -> Places:
        return Places(*(one.reshape(-1) for one in self))


class DevicePass(Paged):
    """A pass over `places`, Q tokens of each sequence of `table` [S, P], of which those `ends` int32 [S] are in the cache afterwards.

    `lengths` int32 [S]: Q, or 0 for a sequence that only pads. `longest`: no position is as large.
    """

    def __init__(
        self, cache: KVCache, table: Tensor, places: Places, ends: Tensor, lengths: Tensor, most: int, longest: int
    ) -> None:
        Context.__init__(self)
        self.cache = cache
        self.rope_len = cache.rope_len
        self._longest, self._most = longest, most
        self._table, self._ends, self._lengths = table, ends, lengths
        self.positions, self._pages, self._offsets = places
        self._plan: PagedPlan | None = None

    def run_layers(self, decoder: object, x: Tensor) -> Tensor | None:
        """Never at once: the compiled step of a CPU has its places from the host."""
        return None

    def _planned(self, q: Tensor) -> PagedPlan:
        """For backends that need the lengths on the host; a captured pass never comes here."""
        if self._plan is None:
            table = self._table.cpu().numpy().astype(np.int64)
            size = self.cache.block_size
            self._plan = plan_sequences(table, self._ends.tolist(), self._lengths.tolist(), size, q.device)
        return self._plan


@dataclass
class Draws:
    """How the sequences draw: for verification a value of each of S * Q tokens, for guesses of each of k * S, one place after another."""

    temperature: Tensor
    seeds: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def draw(self, logits: Tensor, positions: Tensor, filtered: bool) -> tuple[Tensor, Tensor]:
        """(tokens, largest logits) of logits [E, V] for the places `positions` int64 [E] of the first E."""
        some = slice(len(logits))
        filters = (self.top_k[some], self.top_p[some], self.min_p[some]) if filtered else ()
        keys = (self.seeds[some], positions)
        tokens, peaks = sample(logits, self.temperature[some], *filters, keys=keys, peaks=True)
        return tokens, peaks


@dataclass
class Verified:
    """A round in which the model's tokens are known: what a drafter guesses on from, all of it on the device."""

    x: Tensor
    """[S * Q, D] hidden states after the last layer."""
    taps: dict[int, Tensor | None]
    """[S * Q, E] hidden states after the layers that the drafter asked for."""
    chosen: Tensor
    """int64 [S, Q] The model's token after each of the round's; those after column `kept` follow a wrong guess."""
    kept: Tensor
    """int64 [S] Guesses that were kept."""
    starts: Tensor
    """int64 [S] Place of the last token that is known, in its sequence."""
    alive: Tensor
    """int64 [S] 1, or 0 for a sequence that only pads."""
    table: Tensor
    places: Places
    ends: Tensor
    lengths: Tensor
    longest: int
    draws: Draws
    filtered: bool

    def last(self, x: Tensor) -> Tensor:
        """[S, D] of x [S * Q, D]: the row of each sequence's last kept guess."""
        count, width = self.chosen.shape
        return x.view(count, width, -1)[torch.arange(count, device=x.device), self.kept]

    def context(self, cache: KVCache) -> DevicePass:
        """A pass of a drafter over the round's tokens, with a cache of its own under the same page numbers."""
        most = self.chosen.shape[1]
        return DevicePass(cache, self.table, self.places, self.ends, self.lengths, most, self.longest)

    def contexts(self, cache: KVCache, count: int) -> list[DevicePass]:
        """Passes of a drafter over one token each: at `starts` and the `count` - 1 places that follow."""
        ahead = torch.arange(count, device=self.starts.device)[:, None]
        positions = self.starts + ahead
        rows = torch.arange(len(self.starts), device=self.starts.device)
        places = Places.of(positions, rows, self.table, self.alive, cache.block_size)
        ends, ones = ((positions + 1) * self.alive).int(), self.alive.int()
        return [
            DevicePass(cache, self.table, Places(*(one[n] for one in places)), ends[n], ones, 1, self.longest)
            for n in range(count)
        ]

    def draw(self, logits: Tensor, ahead: int, count: int = 1) -> Tensor:
        """int64 [count, S] Guesses from logits [count * S, V] of the places `ahead` + 1 ... after the last known token."""
        more = torch.arange(ahead + 1, ahead + 1 + count, device=logits.device)[:, None]
        tokens, _ = self.draws.draw(logits, (self.starts + more).reshape(-1), self.filtered)
        return tokens.view(count, -1)
