"""Lion: each weight moves by the learning rate in the direction of a momentum's sign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.dims import ModelDims
from hone.cost.train.update import UpdateCost
from hone.train.optimizers.base import Entry, Group, Optimizer, Parameter, Rule, by_decay

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")

STATE_BYTES = 4
MOVED_BYTES = 52
"""Bytes per weight: a mixture of gradient and momentum (12), its sign (8), decay (8), the step (12) and the new momentum (12)."""

NUM_OPS = 5
"""Operations on a list of tensors; on a GPU each starts one kernel for about 100 of them."""


class Lion(Optimizer):
    """The sign of the momentum, with one moment; wants a third to a tenth of AdamW's lr. Chen et al. 2023, arXiv:2302.06675."""

    paper: ClassVar[str] = "arXiv:2302.06675"
    beta1: float = Field(0.9, ge=0, lt=1, description="Share of the momentum in the direction of a step.")
    beta2: float = Field(0.99, ge=0, lt=1, description="Decay of the momentum.")

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """Matrices and vectors."""
        return by_decay(parameters, tuple(parameters), LionRule(self.beta1, self.beta2), self.weight_decay)

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Cost of one moment per weight, and of a direction for each weight of a bucket."""
        params = dims.num_params
        return UpdateCost(STATE_BYTES * params, MOVED_BYTES * params, NUM_OPS * 2, work_bytes=4 * params)


@dataclass(frozen=True)
class LionRule(Rule):
    """Lion on lists of tensors."""

    beta1: float
    beta2: float

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """The momentum, as zeros."""
        return {"exp_avg": torch.zeros_like(weight)}

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """c = beta1 m + (1 - beta1) g; w (1 - lr decay) - lr sign(c); then m = beta2 m + (1 - beta2) g."""
        weights = [entry.weight for entry in entries]
        grads = [entry.grad for entry in entries]
        moments = [entry.state["exp_avg"] for entry in entries]
        directions = torch._foreach_lerp(moments, grads, 1 - self.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_add_(weights, directions, alpha=-lr)
        torch._foreach_lerp_(moments, grads, 1 - self.beta2)
