"""The auxiliary loss over the devices that tokens are sent to: DeepSeek-V2's balance of what each device receives."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hone.model.balance.base import Balance, in_groups
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken


class CommunicationLoss(Balance):
    """weight sum_d f_d P_d, f_d = D / (M T) x tokens sent to device d, P_d the sum of its experts' probabilities. DeepSeek-AI 2024, arXiv:2405.04434.

    A token is sent once to a device, however many of its experts it visits. With every token on M devices and D balanced ones it has weight.
    """

    paper: ClassVar[str] = "arXiv:2405.04434"

    weight: float = Field(0.02, ge=0, description="Weight of the loss.")
    devices: int = Field(2, gt=0, description="D: groups of neighbouring experts.")
    top_devices: int = Field(1, gt=0, description="M: devices that a token may visit (top_groups of the router).")

    def check(self, num_experts: int) -> None:
        in_groups(num_experts, self.devices, "devices")

    def loss(self, seen: Seen, routes: ByToken) -> Tensor:
        ids = routes.ids if routes.asked is None else routes.asked
        sent = torch.zeros(len(ids), self.devices + 1, device=ids.device)  # nobody's device is the last
        sent.scatter_(1, ids // (seen.num_experts // self.devices), 1.0)
        often = sent[:, :-1].mean(0) * (self.devices / self.top_devices)
        return self.weight * (often * routes.scores.mean(0).view(self.devices, -1).sum(-1)).sum()
