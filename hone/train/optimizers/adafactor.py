"""Adafactor: a matrix's second moment as the product of a mean per row and one per column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.dims import ModelDims
from hone.cost.train.update import UpdateCost, layer_matrix_params
from hone.parallel.cut import Cut
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
    divides_stacks: ClassVar[bool] = False
    lr: float = Field(1e-2, gt=0, description="Peak learning rate, as a share of a weight's root mean square.")
    beta2_decay: float = Field(-0.8, le=0, description="At step n the second moment forgets n to this power of itself.")
    eps: float = Field(1e-3, gt=0, description="Smallest root mean square of a weight that scales its step.")
    clipping_threshold: float = Field(1.0, gt=0, description="Largest root mean square of a step before scaling.")

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """Matrices and vectors."""
        rule = AdafactorRule(self.beta2_decay, self.eps, self.clipping_threshold)
        return by_decay(parameters, tuple(parameters), rule, self.weight_decay)

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Cost with a number per row and column of matrices, scaled to all experts, and one per number of two norms a layer."""
        sizes = [size for layer in dims.layers for size in layer.matmuls]
        tables = [(dims.vocab_size, dims.hidden_size)] * (1 if dims.tie_embeddings else 2)
        state = 4.0 * sum(rows + columns for rows, columns in sizes)
        state *= layer_matrix_params(dims) / max(sum(rows * columns for rows, columns in sizes), 1)
        state += 4.0 * sum(map(sum, tables))
        vectors = 4.0 * dims.hidden_size * (2 * dims.num_layers + 1)
        largest = max(rows * columns for rows, columns in sizes + tables)
        return UpdateCost(
            state_bytes=state + vectors,
            moved_bytes=MOVED_BYTES * dims.num_params,
            num_ops=NUM_OPS * len(sizes + tables),
            work_bytes=8.0 * largest,
            op_bytes=4.0 * largest,
            whole_state_bytes=state,
        )


@dataclass(frozen=True)
class AdafactorRule(Rule):
    """Adafactor without momentum, weight by weight; a vector has a second moment for each of its numbers."""

    beta2_decay: float
    eps: float
    clipping_threshold: float
    reads_whole: ClassVar[bool] = True
    whole_states: ClassVar[frozenset[str]] = frozenset({"row_var", "col_var"})

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """Means of squares as zeros: 'row_var' [..., rows, 1] and 'col_var' [..., 1, columns] of the whole matrix, or 'variance' [numbers]."""
        shape = parameter.shape
        if len(shape) < 2:
            return {"variance": torch.zeros_like(weight)}
        return {
            "row_var": weight.new_zeros(*shape[:-1], 1),
            "col_var": weight.new_zeros(*shape[:-2], 1, shape[-1]),
        }

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """u = g / sqrt(v), divided by max(1, rms(u) / threshold); w (1 - lr decay) - max(eps, rms(w)) min(lr, 1 / sqrt(n)) u."""
        fresh, least = count**self.beta2_decay, torch.finfo(torch.float32).eps
        for entry in entries:
            weight, grad, state = entry.weight, entry.grad, entry.state
            numbers = math.prod(entry.parameter.shape)
            rows, columns, weight_norm = norms(entry)
            size = (weight_norm / numbers**0.5).clamp_min(self.eps)
            weight.mul_(1 - lr * weight_decay)
            if rows is None or columns is None:
                square = state["variance"].lerp_(grad.square(), fresh).clone()
            else:
                row = state["row_var"].lerp_(rows / columns.shape[-1], fresh)
                column = state["col_var"].lerp_(columns / rows.shape[-2], fresh)
                mean = row.mean(dim=-2, keepdim=True).clamp_min(least)
                if entry.part is not None:
                    row, column = own(row, entry.part.cut), own(column, entry.part.cut)
                square = (row * column).div_(mean)
            step = square.clamp_min_(least * least).rsqrt_().mul_(grad)
            norm = step.norm() if entry.part is None else entry.part.add(step.norm().square()).sqrt()
            share = min(lr, count**-0.5) * size / (norm / numbers**0.5 / self.clipping_threshold).clamp_min(1.0)
            weight.sub_(step.mul_(share))


def norms(entry: Entry) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Squared norms of the rows [..., rows, 1] and columns [..., 1, columns] of the whole gradient (None: a vector's), and the weight's norm.

    Tensor-parallel ranks add theirs up in one message.
    """
    weight, grad, part = entry.weight, entry.grad, entry.part
    norm, rows, columns = weight.norm(), None, None
    if weight.ndim >= 2:
        rows, columns = (grad.norm(dim=axis, keepdim=True).square() for axis in (-1, -2))
    if part is None:
        return rows, columns, norm
    if rows is None or columns is None:
        return None, None, part.add(norm.square()).sqrt()
    (num_rows, num_columns), axis, ranges, _ = part.cut
    message = grad.new_zeros(num_rows + num_columns + 1)
    message[-1] = norm.square()
    if axis == 0:
        Cut((num_rows,), 0, ranges).put(rows.view(-1), message[:num_rows])
        message[num_rows:-1] = columns.view(-1)
    else:
        message[:num_rows] = rows.view(-1)
        Cut((num_columns,), 0, ranges).put(columns.view(-1), message[num_rows:-1])
    message = part.add(message)
    return message[:num_rows, None], message[None, num_rows:-1], message[-1].sqrt()


def own(means: Tensor, cut: Cut) -> Tensor:
    """What of the whole matrix's means per row or column this rank's part has: all, unless that axis is cut."""
    return means if means.shape[cut.axis] == 1 else cut.take(means)
