"""Balance without a loss: a bias of the choice that rises for experts with too few tokens and falls for those with too many."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hone.model.balance.base import Balance


class Bias(Balance):
    """After each step b_i += rate x sign(mean load - load_i), loads of the whole batch. Wang et al. 2024, arXiv:2408.15664.

    The bias takes part in the choice of experts alone, not in their weights, and no gradient flows through it. It is saved
    with the model and its checkpoints.
    """

    paper: ClassVar[str] = "arXiv:2408.15664"
    moves_bias: ClassVar[bool] = True

    rate: float = Field(1e-3, ge=0, description="What the bias moves by in a step.")

    def moved(self, bias: Tensor, loads: Tensor) -> Tensor:
        """`bias` [..., E] after a step in which the experts were asked for by `loads` [..., E] tokens."""
        wide = loads.to(bias.device, torch.float32)
        return bias + self.rate * (wide.mean(-1, keepdim=True) - wide).sign()
