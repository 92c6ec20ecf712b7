"""What a router decides, as what is done with it: rows of tokens for each expert, and the sum of what experts made of them.

Legend: T tokens, E experts, k experts a token, C tokens an expert, B sequences of S tokens, P slots an expert, D width.
Every kind of routes has `dispatch(x [T, D]) -> (rows [R, D] sorted by expert, ends int32 [E])` and `combine(made [R, D]) -> [T, D]`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops import permute, unpermute


@dataclass
class ByToken:
    """Tokens choose experts: `ids` [T, k], of which E is nobody, and `weights` float32 [T, k]."""

    ids: Tensor
    weights: Tensor
    num_experts: int
    scores: Tensor
    """float32 [T, E], summing to 1 over the experts: what balance and the entropy are computed from."""
    leaves_out: bool = False
    """Whether some `ids` may be nobody. Their number must then be known on the host, which waits for the device."""
    asked: Tensor | None = None
    """`ids` before a capacity left some out; None: all are served."""

    def dispatch(self, x: Tensor, pieces: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """With `pieces`, where no visit is left out, rows lie in rooms, as `permute` has them."""
        if not self.leaves_out:
            rows, ends, self._place = permute(x, self.ids, self.num_experts, pieces=pieces)
            self._in_pieces = pieces is not None
            return rows, ends
        assert pieces is None, "rows without visits are cut off by their number"
        rows, ends, self._place = permute(x, self.ids, self.num_experts + 1)
        return rows[: int(ends[-2])], ends[:-1]

    def combine(self, made: Tensor) -> Tensor:
        if not self.leaves_out:
            return unpermute(made, self._place, self.weights, in_pieces=self._in_pieces)
        made = F.pad(made, (0, 0, 0, self.ids.numel() - len(made)))
        return unpermute(made, self._place, self.weights * (self.ids < self.num_experts))

    def within(self, capacity: int, *, by_score: bool) -> ByToken:
        """The same with at most `capacity` tokens an expert. First choices come before second ones, as in GShard; among equal
        choices earlier tokens first, or with `by_score` those whose largest score is larger (batch-prioritized routing)."""
        count, flat = len(self.ids), self.ids.T.reshape(-1)  # all first choices, then all second ones
        if by_score:
            first = self.scores.detach().amax(-1).argsort(descending=True, stable=True)
            flat = self.ids[first].T.reshape(-1)
        order = flat.argsort(stable=True)
        starts = counts_of(flat, self.num_experts + 1).cumsum(0).roll(1)
        starts[0] = 0
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - starts[flat[order]]
        kept = (rank < capacity).view(-1, count).T
        if by_score:
            kept = torch.empty_like(kept).index_copy_(0, first, kept)
        ids = torch.where(kept, self.ids, self.num_experts)
        return replace(self, ids=ids, leaves_out=True, asked=self.ids)

    @property
    def loads(self) -> Tensor:
        """Tokens that ask for each expert, before any are left out: int64 [E]."""
        asked = self.ids if self.asked is None else self.asked
        return counts_of(asked.reshape(-1), self.num_experts + 1)[: self.num_experts]

    @property
    def dropped(self) -> Tensor:
        """Visits that a capacity left out: an int64 scalar."""
        nobody = (self.ids == self.num_experts).sum()
        return nobody - nobody if self.asked is None else nobody - (self.asked == self.num_experts).sum()


@dataclass
class ByExpert:
    """Experts choose tokens: `tokens` [E, C] and `weights` float32 [E, C]; `scores` as in `ByToken`."""

    tokens: Tensor
    weights: Tensor
    scores: Tensor

    def dispatch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        experts, each = self.tokens.shape
        ends = torch.arange(1, experts + 1, device=x.device, dtype=torch.int32) * each
        return x[self.tokens.flatten()], ends

    def combine(self, made: Tensor) -> Tensor:
        weighted = made.float() * self.weights.reshape(-1, 1)
        whole = weighted.new_zeros(len(self.scores), made.shape[1])
        return whole.index_add(0, self.tokens.flatten(), weighted).to(made.dtype)

    @property
    def loads(self) -> Tensor:
        """Tokens of each expert: int64 [E]."""
        return torch.full((len(self.tokens),), self.tokens.shape[1], device=self.tokens.device)

    @property
    def dropped(self) -> Tensor:
        """Tokens that no expert chose: an int64 scalar."""
        chosen = counts_of(self.tokens.flatten(), len(self.scores))
        return (chosen == 0).sum()


@dataclass
class BySlot:
    """Slots are mixtures of a sequence's tokens, and tokens mixtures of the results: `gather`, `spread` float32 [B, S, E, P]."""

    gather: Tensor
    spread: Tensor

    def dispatch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sequences, length, experts, slots = self.gather.shape
        rows = torch.einsum("bsep,bsd->ebpd", self.gather, x.view(sequences, length, -1).float())
        ends = torch.arange(1, experts + 1, device=x.device, dtype=torch.int32) * (sequences * slots)
        return rows.flatten(0, 2).to(x.dtype), ends

    def combine(self, made: Tensor) -> Tensor:
        sequences, _, experts, slots = self.spread.shape
        rows = made.view(experts, sequences, slots, -1).float()
        return torch.einsum("bsep,ebpd->bsd", self.spread, rows).flatten(0, 1).to(made.dtype)

    @property
    def scores(self) -> Tensor:
        """Each token's weights of the experts, [T, E]."""
        return self.spread.sum(-1).flatten(0, 1)

    @property
    def loads(self) -> Tensor:
        """Slots of each expert in all sequences: int64 [E]."""
        sequences, _, experts, slots = self.gather.shape
        return torch.full((experts,), sequences * slots, device=self.gather.device)

    @property
    def dropped(self) -> Tensor:
        """None ever: an int64 scalar."""
        return torch.zeros((), dtype=torch.int64, device=self.gather.device)


Routes = ByToken | ByExpert | BySlot


def counts_of(numbers: Tensor, size: int) -> Tensor:
    """How often each of 0 ... size - 1 is in `numbers` [n]: int64 [size]. Not torch.bincount, which waits for a GPU."""
    return numbers.new_zeros(size, dtype=torch.int64).scatter_add_(0, numbers, torch.ones_like(numbers))
