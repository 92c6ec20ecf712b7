"""Experts choose their tokens, so that all have equally many: expert choice."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.model.routers.base import Router, Seen
from hone.model.routers.routes import ByExpert


class ExpertChoice(Router):
    """Each expert takes the T c / E tokens that give it the largest share of their softmax. Zhou et al. 2022, arXiv:2202.09368.

    What a token gets depends on the others of the pass, later ones too: for encoders and comparisons.
    """

    paper: ClassVar[str] = "arXiv:2202.09368"
    causal: ClassVar[bool] = False
    by_token: ClassVar[bool] = False

    experts_per_token: int = Field(2, gt=0, description="c: experts that a token visits on average.")

    def visits(self, num_experts: int) -> int:
        return self.experts_per_token

    def route(self, seen: Seen) -> ByExpert:
        scores = seen.logits.softmax(-1)  # type: ignore[union-attr]
        each = max(1, len(scores) * self.experts_per_token // seen.num_experts)
        weights, tokens = scores.T.topk(each, -1)
        return ByExpert(tokens, weights, scores)
