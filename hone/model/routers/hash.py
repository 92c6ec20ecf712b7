"""The expert of a token is a fixed function of its id: nothing to learn or to balance."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hone.model.routers.base import Router, Seen
from hone.model.routers.routes import ByToken


class Hash(Router):
    """One expert by a random hash of the token's id, with weight 1. Roller et al. 2021, arXiv:2106.04426."""

    paper: ClassVar[str] = "arXiv:2106.04426"
    reads_tokens: ClassVar[bool] = True

    seed: int = Field(0, ge=0, description="Another one is another function.")

    def visits(self, num_experts: int) -> int:
        return 1

    def outputs(self, num_experts: int) -> int:
        return 0

    def route(self, seen: Seen) -> ByToken:
        assert seen.tokens is not None, "the hash router is given token ids"
        ids = mixed(seen.tokens, self.seed)[:, None] % seen.num_experts
        scores = torch.zeros(len(ids), seen.num_experts, device=ids.device).scatter_(-1, ids, 1.0)
        return ByToken(ids, torch.ones_like(ids, dtype=torch.float32), seen.num_experts, scores)


def mixed(tokens: Tensor, seed: int) -> Tensor:
    """A pseudorandom number from 0 to 2^32 - 1 for each id: the steps of MurmurHash3's 32-bit finalizer."""
    word, found = 0xFFFFFFFF, (tokens.long() + (seed + 1) * 0x9E3779B9) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = found ^ (found >> shift)
        low, high = found & 0xFFFF, found >> 16  # in halves: a product of two words overflows int64
        found = (low * factor + (((high * factor) & 0xFFFF) << 16)) & word
    return found ^ (found >> 16)
