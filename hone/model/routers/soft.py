"""Experts compute mixtures of tokens, and tokens are mixtures of what they made: soft mixture of experts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.model.routers.base import Router, Seen
from hone.model.routers.routes import BySlot


class Soft(Router):
    """Slots are softmax mixtures of a sequence's tokens, tokens softmax mixtures of the slots' results. Puigcerver et al. 2023, arXiv:2308.00951.

    Every token gets something of every other: for encoders and comparisons. Costs are counted for as many slots as tokens.
    """

    paper: ClassVar[str] = "arXiv:2308.00951"
    causal: ClassVar[bool] = False
    by_token: ClassVar[bool] = False

    slots: int = Field(1, gt=0, description="Slots of each expert, in every sequence.")

    def visits(self, num_experts: int) -> int:
        return 1

    def outputs(self, num_experts: int) -> int:
        return num_experts * self.slots

    def route(self, seen: Seen) -> BySlot:
        logits = seen.logits.view(seen.sequences, -1, seen.num_experts, self.slots)  # type: ignore[union-attr]
        spread = logits.flatten(2).softmax(-1).view_as(logits)
        return BySlot(logits.softmax(1), spread)
