"""Each expert's score is a sigmoid of its own, and a bias that balances takes part in the choice alone: DeepSeek-V3."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from hone.model.routers.base import Router, Seen
from hone.model.routers.grouped import best, check_groups
from hone.model.routers.routes import ByToken


class Sigmoid(Router):
    """The top_k experts by sigmoid, at most top_groups groups, weights made to sum to scale. DeepSeek-AI 2024, arXiv:2412.19437."""

    paper: ClassVar[str] = "arXiv:2412.19437"
    takes_bias: ClassVar[bool] = True

    top_k: int = Field(2, gt=0, description="Experts that a token visits.")
    normalize: bool = Field(True, description="Weights of the chosen sum to 1 before they are scaled (norm_topk_prob).")
    scale: float = Field(1.0, gt=0, description="Weights are multiplied by it (routed_scaling_factor).")
    num_groups: int = Field(1, gt=0, description="Groups of neighbouring experts (nodes); 1: no groups.")
    top_groups: int = Field(
        1, gt=0, description="Groups that a token may visit, those whose two best scores have the largest sum."
    )

    def visits(self, num_experts: int) -> int:
        return self.top_k

    def check(self, num_experts: int) -> None:
        super().check(num_experts)
        check_groups(num_experts, self.top_k, self.num_groups, self.top_groups, 2)

    def route(self, seen: Seen) -> ByToken:
        scores = seen.logits.sigmoid()  # type: ignore[union-attr]
        with torch.no_grad():
            choice = scores if seen.bias is None else scores + seen.bias
            ids = best(choice, self.top_k, self.num_groups, self.top_groups, 2)
        weights = scores.gather(-1, ids)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ByToken(ids, weights * self.scale, seen.num_experts, scores / scores.sum(-1, keepdim=True))
