"""Adafactor: a matrix's second moment as the product of a mean per row and one per column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.facts import ModelFacts
from hone.cost.update import UpdateCost, layer_matrix_params
from hone.train.optimizers.base import Entry, Group, Optimizer, Parameter, Rule, by_decay

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")

MOVED_BYTES = 64
"""Bytes per weight: two squared norms (8), the product's root (20), the direction (12), its norm (4), decay (8), step (12)."""

NUM_OPS = 16
"""Operations on one matrix."""


class Adafactor(Optimizer):
    """A second moment of a number per row and column, and steps relative to the weight's size. Shazeer and Stern 2018, arXiv:1804.04235."""

    paper: ClassVar[str] = "arXiv:1804.04235"
    lr: float = Field(1e-2, gt=0, description="Peak learning rate, as a share of a weight's root mean square.")
    beta2_decay: float = Field(-0.8, le=0, description="At step n the second moment forgets n to this power of itself.")
    eps: float = Field(1e-3, gt=0, description="Smallest root mean square of a weight that scales its step.")
    clipping_threshold: float = Field(1.0, gt=0, description="Largest root mean square of a step before scaling.")

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """Matrices and vectors."""
        rule = AdafactorRule(self.beta2_decay, self.eps, self.clipping_threshold)
        return by_decay(parameters, tuple(parameters), rule, self.weight_decay)

    def cost(self, facts: ModelFacts, dtype: str, device: str) -> UpdateCost:
        """Cost with a number per row and column of matrices, scaled to all experts, and one per number of two norms a layer."""
        sizes = [size for layer in facts.layers for size in layer.matmuls]
        tables = [(facts.vocab_size, facts.hidden_size)] * (1 if facts.tie_embeddings else 2)
        state = 4.0 * sum(rows + columns for rows, columns in sizes)
        state *= layer_matrix_params(facts) / max(sum(rows * columns for rows, columns in sizes), 1)
        state += 4.0 * (sum(map(sum, tables)) + facts.hidden_size * (2 * facts.num_layers + 1))
        largest = max(rows * columns for rows, columns in sizes + tables)
        return UpdateCost(
            state_bytes=state,
            moved_bytes=MOVED_BYTES * facts.num_params,
            num_ops=NUM_OPS * len(sizes + tables),
            work_bytes=8.0 * largest,
            op_bytes=4.0 * largest,
        )


@dataclass(frozen=True)
class AdafactorRule(Rule):
    """Adafactor without momentum, weight by weight; a vector has a second moment for each of its numbers."""

    beta2_decay: float
    eps: float
    clipping_threshold: float
    reads_whole: ClassVar[bool] = True

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        """Means of squares as zeros: 'row_var' [..., rows, 1] and 'col_var' [..., 1, columns], or 'variance' [numbers]."""
        if weight.ndim < 2:
            return {"variance": torch.zeros_like(weight)}
        return {
            "row_var": weight.new_zeros(*weight.shape[:-1], 1),
            "col_var": weight.new_zeros(*weight.shape[:-2], 1, weight.shape[-1]),
        }

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """u = g / sqrt(v), divided by max(1, rms(u) / threshold); w (1 - lr decay) - max(eps, rms(w)) min(lr, 1 / sqrt(n)) u."""
        fresh, least = count**self.beta2_decay, torch.finfo(torch.float32).eps
        for entry in entries:
            weight, grad, state = entry.weight, entry.grad, entry.state
            size = rms(weight).clamp_min(self.eps)
            weight.mul_(1 - lr * weight_decay)
            if weight.ndim < 2:
                square = state["variance"].lerp_(grad.square(), fresh).clone()
            else:
                row = state["row_var"].lerp_(grad.norm(dim=-1, keepdim=True).square() / grad.shape[-1], fresh)
                column = state["col_var"].lerp_(grad.norm(dim=-2, keepdim=True).square() / grad.shape[-2], fresh)
                square = (row * column).div_(row.mean(dim=-2, keepdim=True).clamp_min(least))
            step = square.clamp_min_(least * least).rsqrt_().mul_(grad)
            share = min(lr, count**-0.5) * size / (rms(step) / self.clipping_threshold).clamp_min(1.0)
            weight.sub_(step.mul_(share))


def rms(values: Tensor) -> Tensor:
    """The root mean square, a scalar."""
    return values.norm() / values.numel() ** 0.5
