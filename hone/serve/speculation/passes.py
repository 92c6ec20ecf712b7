"""Passes whose places are on the device: what a captured round reads, with no number of the host's in it.

Legend: S sequences, Q new tokens of each, P pages of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.model.context import Context
from hone.ops import sample
from hone.ops.paged.api import PagedPlan, plan_sequences
from hone.serve.paging.cache import KVCache
from hone.serve.paging.paged import Paged
from hone.serve.speculation.round_state import RoundState


class DevicePass(Paged):
    """A pass over tokens at `places` (positions, pages, offsets, int64 [T] each), `most` of each sequence of `table` [S, P].

    `ends` int32 [S] tokens are in the cache afterwards, `lengths` int32 [S] of them new: `most`, or 0 for a sequence that only pads. No
    position is as large as `longest`. Where another pass has the same positions, `like` is that pass and the rows that they are there.
    """

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        ends: Tensor,
        lengths: Tensor,
        most: int,
        longest: int,
        like: tuple[DevicePass, slice] | None = None,
        tree: Tensor | None = None,
    ) -> None:
        """`tree` int64 [most]: the new tokens are a tree, as in `hone.ops.attend_paged`; None: they follow one another."""
        Context.__init__(self)
        self._tree = tree
        self.cache = cache
        self.rope_len = cache.rope_len
        self._longest, self._most = longest, most
        self._table, self._ends, self._lengths = table, ends, lengths
        self.positions, self._pages, self._offsets = places
        self._plan: PagedPlan | None = None
        self._like = like

    def run_layers(self, decoder: object, x: Tensor) -> Tensor | None:
        """Never at once: the compiled step of a CPU has its places from the host."""
        return None

    def rotary(self, rope: Any, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._like is None:
            return super().rotary(rope, head_dim, dtype)
        other, rows = self._like
        cos, sin = other.rotary(rope, head_dim, dtype)
        return cos[rows], sin[rows]

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
    filtered: bool
    """Whether top-k, top-p and min-p are read."""

    def draw(self, logits: Tensor, positions: Tensor, several: int = 1) -> tuple[Tensor, Tensor]:
        """(tokens, largest logits) of logits [E, V] for the places `positions` int64 [E] of the first E; [E, several] tokens if more than one."""
        some = slice(len(logits))
        filters = (self.top_k[some], self.top_p[some], self.min_p[some]) if self.filtered else ()
        keys = (self.seeds[some], positions)
        tokens, peaks = sample(logits, self.temperature[some], *filters, keys=keys, peaks=True, several=several)
        return tokens, peaks


@dataclass
class Verified:
    """A round in which the model's tokens are known: what a drafter guesses on from, all of it on the device."""

    x: Tensor
    """[S * Q, D] hidden states after the last layer."""
    chosen: Tensor
    """int64 [S * Q] The model's token after each of the round's; those of nodes that are not on the path follow a wrong guess."""
    state: RoundState
    context: DevicePass
    """The model's pass, with hidden states after the layers that the drafter asked for in its `taps`."""
    lengths: Tensor
    """int32 [S] 1 + k, or 0 for a sequence that only pads."""
    ones: Tensor
    """int32 [S] 1, or 0 for a sequence that only pads."""
    draws: Draws

    def last(self, x: Tensor) -> Tensor:
        """[S, D] of x [S * Q, D]: the row of each sequence's last kept guess."""
        return x.index_select(0, self.state.rows[0])

    def on_path(self, x: Tensor) -> Tensor:
        """[S * (1 + k), ...] of x [S * Q, ...]: the rows of the path's nodes, behind it any."""
        return x if self.state.tree.is_chain else x.index_select(0, self.state.path.view(-1))

    def path_last(self, g: Tensor) -> Tensor:
        """[S, D] of g [S * (1 + k), D]: the row of each sequence's last kept guess on the path."""
        return g.index_select(0, self.state.rows[1])

    def again(self, cache: KVCache) -> DevicePass:
        """A pass of a drafter over the path's tokens, with a cache of its own under the same page numbers."""
        state, most, chain = self.state, self.state.path.shape[1], self.state.tree.is_chain
        like = (self.context, slice(None)) if chain else None
        # Of a chain both have the same numbers; those at a buffer's begin are aligned, as the variants compiled for the model's pass are.
        ends, lengths = (state.ends[0], self.context._lengths) if chain else (state.ends[1], self.lengths)
        positions, _, pages, offsets = state.placed[:, :, :most].flatten(1)
        places, longest = (positions, pages, offsets), self.context._longest
        return DevicePass(cache, state.table, places, ends, lengths, most, longest, like)

    def onward(self, cache: KVCache, count: int) -> list[DevicePass]:
        """Passes of a drafter over one token each: the last known one, and the guesses that follow but the last."""
        state, longest = self.state, self.context._longest
        seqs = len(state.starts)
        positions, pages, offsets = state.draft.flatten(1)
        whole = DevicePass(cache, state.table, (positions, pages, offsets), state.ends[0], self.ones, 1, longest)
        found = []
        for number in range(count):
            rows = slice(number * seqs, (number + 1) * seqs)
            places = positions[rows], pages[rows], offsets[rows]
            ends = state.draft_ends[number]
            found.append(DevicePass(cache, state.table, places, ends, self.ones, 1, longest, (whole, rows)))
        return found

    def draw(self, logits: Tensor, ahead: int) -> Tensor:
        """int64 [E, choices] Guesses from logits [E, V] of all sequences for the `ahead`-th guess, then for those that follow it."""
        first = ahead * len(self.state.starts)
        places = self.state.after.view(-1)[first : first + len(logits)]
        return self.draws.draw(logits, places, self.state.tree.width)[0].view(len(logits), -1)
