"""The auxiliary loss over groups of experts, those of a device: DeepSeek-V2's."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from hone.model.balance.base import Balance, asked, in_groups
from hone.model.routers.base import Seen
from hone.model.routers.routes import ByToken


class DeviceLoss(Balance):
    """weight sum_d f_d P_d, f_d the mean of E / (k T) x visits over a device's experts, P_d the sum of their probabilities. DeepSeek-AI 2024, arXiv:2405.04434.

    Balanced devices have weight, however busy experts of one device are.
    """

    paper: ClassVar[str] = "arXiv:2405.04434"

    weight: float = Field(0.05, ge=0, description="Weight of the loss.")
    devices: int = Field(2, gt=0, description="Groups of neighbouring experts.")

    def check(self, num_experts: int) -> None:
        in_groups(num_experts, self.devices, "devices")

    def loss(self, seen: Seen, routes: ByToken) -> Tensor:
        often = asked(routes) * (seen.num_experts / routes.ids.shape[1])
        means = often.view(self.devices, -1).mean(-1)
        return self.weight * (means * routes.scores.mean(0).view(self.devices, -1).sum(-1)).sum()
