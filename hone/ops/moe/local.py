"""A router's choice on one of several ranks that divide experts whole: ids of experts become ids of the rank's slots.

Legend: T tokens, k experts a token, E experts of all ranks, C copies of an expert at most. A slot is one expert's weights on a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hone.base.errors import SpecError

SPREAD = 2_654_435_761
"""Knuth's multiplier (2^32 / golden ratio): neighbouring tokens get different copies."""


class LocalExperts(NamedTuple):
    """Where the experts of all ranks are, as one rank sees it. All tensors are on the tokens' device and may change between two passes."""

    slots: Tensor
    """int32 [E, C]: this rank's slot of each copy of an expert; `num_slots` where the copy is on another rank."""
    copies: Tensor
    """int32 [E]: copies of each expert, 1 to C."""
    num_slots: int
    """Slots of this rank; as an id, nobody."""
    key: Tensor | None = None
    """int64 [T], at least 0: a hash of it says which copy computes a token. Needed where C > 1."""
    counts: Tensor | None = None
    """int64 [E], to which visits of each expert are added; None: they are not counted."""
    real: Tensor | None = None
    """bool [T]: tokens whose visits are counted; None: all."""

    def check(self, num_tokens: int, num_experts: int) -> None:
        """Raises SpecError for tensors that do not fit T tokens and E experts."""
        many = self.slots.dim() == 2 and self.slots.shape[1] > 1
        fits = self.slots.shape[:1] == self.copies.shape == (num_experts,) and self.slots.dim() == 2
        fits = fits and (self.key is not None if many else True) and self.num_slots > 0
        fits = fits and all(one is None or one.shape == (num_tokens,) for one in (self.key, self.real))
        if not fits or (self.counts is not None and self.counts.shape != (num_experts,)):
            given = {
                name: None if one is None else tuple(one.shape)
                for name, one in self._asdict().items()
                if name != "num_slots"
            }
            raise SpecError(
                f"local experts {given} with {self.num_slots} slots do not fit {num_tokens} tokens and {num_experts} experts",
                fix="give slots [E, C], copies [E], counts [E] or None, real [T] or None, and a key [T] where C > 1",
            )

    def slots_of(self, ids: Tensor) -> Tensor:
        """The slots of experts `ids` [T, k], of the same shape and dtype; `counts` grow by the visits."""
        if self.counts is not None:
            seen = torch.ones_like(ids) if self.real is None else self.real[:, None].expand_as(ids)
            self.counts.scatter_add_(0, ids.flatten().long(), seen.flatten().long())
        ids_long = ids.long()
        if self.key is None or self.slots.shape[1] == 1:
            return self.slots[ids_long, 0].to(ids.dtype)
        copy = ((self.key[:, None] * SPREAD) >> 16) % self.copies[ids_long]
        return self.slots[ids_long, copy].to(ids.dtype)
