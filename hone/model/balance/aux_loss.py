"""The auxiliary loss of Switch Transformer: its gradient lowers the probabilities of experts that many tokens ask for."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from hone.model.balance.base import Balance, asked
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken


class AuxLoss(Balance):
    """weight E sum_i f_i P_i, f_i the share of tokens that ask for expert i, P_i its mean probability. Fedus et al. 2021, arXiv:2101.03961.

    With k experts a token the f_i sum to k, as in Mixtral's router_aux_loss_coef: a balanced router has weight x k.
    """

    paper: ClassVar[str] = "arXiv:2101.03961"

    weight: float = Field(0.01, ge=0, description="Weight of the loss.")

    def loss(self, seen: Seen, routes: ByToken) -> Tensor:
        return self.weight * seen.num_experts * (asked(routes) * routes.scores.mean(0)).sum()
