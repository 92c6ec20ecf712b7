"""The router's z-loss: keeps its logits small, so that their rounding matters less. It steadies training; it does not balance."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from hone.model.balance.base import Balance
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken


class ZLoss(Balance):
    """weight x mean over tokens of log(sum_i exp(logit_i))^2. Zoph et al. 2022, arXiv:2202.08906."""

    paper: ClassVar[str] = "arXiv:2202.08906"

    weight: float = Field(1e-3, ge=0, description="Weight of the loss.")

    def loss(self, seen: Seen, routes: ByToken) -> Tensor | None:
        return None if seen.logits is None else self.weight * seen.logits.logsumexp(-1).square().mean()
