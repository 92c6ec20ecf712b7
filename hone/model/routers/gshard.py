"""Two experts a token, the second one at random in training: GShard, and without the random choice GLaM."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from hone.model.routers.base import Router, Seen
from hone.model.routers.routes import ByToken


class GShard(Router):
    """The best two experts, weights made to sum to 1, the second visited with probability twice its weight. Lepikhin et al. 2020, arXiv:2006.16668.

    The paper's layers take turns with dense ones and have a capacity_factor of 1: 2 T / E tokens an expert. GLaM (Du et al. 2021,
    arXiv:2112.06905) visits both.
    """

    paper: ClassVar[str] = "arXiv:2006.16668"

    random_second: bool = Field(
        True, description="In training, visit the second expert with probability min(1, twice its weight) alone."
    )

    def visits(self, num_experts: int) -> int:
        return 2

    def route(self, seen: Seen) -> ByToken:
        scores = seen.logits.softmax(-1)  # type: ignore[union-attr]
        weights, ids = scores.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        if not self.random_second or seen.draws is None:
            return ByToken(ids, weights, seen.num_experts, scores)
        drawn = torch.rand(len(ids), generator=seen.draws).to(ids.device)
        second = torch.where(2 * weights[:, 1] > drawn, ids[:, 1], seen.num_experts)
        return ByToken(torch.stack((ids[:, 0], second), -1), weights, seen.num_experts, scores, leaves_out=True)
