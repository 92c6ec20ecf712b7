"""The auxiliary loss within each sequence: DeepSeek-V3's, small beside a bias that balances the batch."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hone.model.balance.base import Balance
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken


class SequenceLoss(Balance):
    """weight x mean over sequences of sum_i f_i P_i, f_i = E / (k S) x visits of expert i, P_i its mean share. DeepSeek-AI 2024, arXiv:2412.19437.

    A balanced sequence has weight.
    """

    paper: ClassVar[str] = "arXiv:2412.19437"
    whole_sequences: ClassVar[bool] = True

    weight: float = Field(1e-4, ge=0, description="Weight of the loss.")

    def loss(self, seen: Seen, routes: ByToken) -> Tensor:
        ids = (routes.ids if routes.asked is None else routes.asked).view(seen.sequences, -1)
        visits = torch.zeros(seen.sequences, seen.num_experts + 1, device=ids.device)
        visits.scatter_add_(1, ids, torch.ones_like(ids, dtype=visits.dtype))
        shares = routes.scores.view(seen.sequences, -1, seen.num_experts).mean(1)
        often = visits[:, :-1] * (seen.num_experts / ids.shape[1])
        return self.weight * (often * shares).sum(-1).mean()
