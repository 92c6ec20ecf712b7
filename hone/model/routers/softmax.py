"""Softmax over the experts, of which each token visits the best few: Mixtral, Qwen-MoE, OLMoE, DeepSeek-V2."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from hone.model.routers.base import Router, Seen
from hone.model.routers.grouped import best, check_groups
from hone.model.routers.routes import ByToken


class Softmax(Router):
    """The top_k experts by softmax; weights as they are or made to sum to 1. Shazeer et al. 2017, arXiv:1701.06538."""

    paper: ClassVar[str] = "arXiv:1701.06538"
    takes_bias: ClassVar[bool] = True

    top_k: int = Field(2, gt=0, description="Experts that a token visits.")
    normalize: bool = Field(
        True,
        description="Weights of the chosen sum to 1 (Mixtral: softmax over the chosen alone, which is the same; Qwen3-MoE); "
        "false: they are shares of all experts (OLMoE, DeepSeek-V2).",
    )
    scale: float = Field(1.0, gt=0, description="Weights are multiplied by it (routed_scaling_factor).")
    num_groups: int = Field(1, gt=0, description="Groups of neighbouring experts (devices); 1: no groups.")
    top_groups: int = Field(1, gt=0, description="Groups that a token may visit, those with the largest score.")

    def visits(self, num_experts: int) -> int:
        return self.top_k

    def check(self, num_experts: int) -> None:
        super().check(num_experts)
        check_groups(num_experts, self.top_k, self.num_groups, self.top_groups, 1)

    def route(self, seen: Seen) -> ByToken:
        scores = seen.logits.softmax(-1)  # type: ignore[union-attr]
        with torch.no_grad():
            choice = scores if seen.bias is None else scores + seen.bias
            ids = best(choice, self.top_k, self.num_groups, self.top_groups, 1)
        weights = scores.gather(-1, ids)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ByToken(ids, weights * self.scale, seen.num_experts, scores)
