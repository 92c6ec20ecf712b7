"""One expert a token: Switch Transformer."""

from __future__ import annotations

from typing import ClassVar

from hone.model.routers.base import Router, Seen
from hone.model.routers.routes import ByToken


class Switch(Router):
    """The best expert alone, weighted by its share of the softmax. Fedus et al. 2021, arXiv:2101.03961.

    The paper's switch layer has this router with a capacity_factor of 1 to 1.25, a jitter of 0.01 and an aux_loss of 0.01.
    """

    paper: ClassVar[str] = "arXiv:2101.03961"

    def visits(self, num_experts: int) -> int:
        return 1

    def route(self, seen: Seen) -> ByToken:
        scores = seen.logits.softmax(-1)  # type: ignore[union-attr]
        weights, ids = scores.max(-1, keepdim=True)
        return ByToken(ids, weights, seen.num_experts, scores)
