"""AdamW: each weight's step is its mean gradient over the root of its mean squared gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.dims import ModelDims
from hone.cost.train.update import UpdateCost, adamw
from hone.train.optimizers.base import Entry, Group, Optimizer, Parameter, Rule, by_decay

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")


class AdamW(Optimizer):
    """AdamW, weight decay on matrices only. Loshchilov and Hutter 2017, arXiv:1711.05101."""

    paper: ClassVar[str] = "arXiv:1711.05101"
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the running mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of squared gradients.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """Matrices and vectors."""
        rule = AdamWRule(self.beta1, self.beta2, self.eps)
        return by_decay(parameters, tuple(parameters), rule, self.weight_decay)

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Cost of two moments per weight."""
        return adamw(dims, fused=device.startswith("cuda"))


@dataclass(frozen=True)
class AdamWRule(Rule):
    """AdamW: on a CPU torch's fused form for a list of tensors, on a GPU one pass over memory for all that a weight's update does."""

    beta1: float
    beta2: float
    eps: float

    def fuses(self, weight: Tensor) -> bool:
        """On a GPU with a kernel of hone's."""
        from hone.ops.dispatch import runs_kernel

        return runs_kernel("adamw_step", weight.device, dtype=weight.dtype)

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """Both moments, as zeros."""
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """m and v are running means of g and g^2; w (1 - lr decay) - lr m' / (sqrt(v') + eps), with m' and v' bias-corrected."""
        if self.fuses(entries[0].weight):
            from hone.ops.update.api import AdamWNumbers, adamw_step

            numbers = AdamWNumbers(count, lr, self.beta1, self.beta2, self.eps, weight_decay)
            for one in entries:
                moments = one.state["exp_avg"], one.state["exp_avg_sq"]
                adamw_step(one.weight, one.grad.contiguous(), *moments, numbers, factor=one.factor, rounded=one.rounded)
            return
        # The operation itself: torch.optim's function around it takes about as long as a million weights' step on 16 threads.
        done = torch.full((len(entries),), float(count), device=entries[0].weight.device)
        torch._fused_adamw_(
            [entry.weight for entry in entries],
            [entry.grad for entry in entries],
            [entry.state["exp_avg"] for entry in entries],
            [entry.state["exp_avg_sq"] for entry in entries],
            [],
            list(done.unbind()),
            amsgrad=False,
            maximize=False,
            lr=lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=weight_decay,
            eps=self.eps,
        )
