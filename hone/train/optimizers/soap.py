"""SOAP: Adam in the slowly turning eigenbasis of Shampoo's two factors of a matrix's second moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field

from hone.base.lazy import lazy
from hone.cost.dims import ModelDims
from hone.cost.train.update import ADAMW_MOVED_BYTES, ADAMW_OPS, ADAMW_STATE_BYTES, UpdateCost, layer_matrix_params
from hone.train.optimizers.adamw import AdamWRule
from hone.train.optimizers.base import Entry, Group, Optimizer, Parameter, Rule, by_decay

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")

MOVED_BYTES = 120
"""Bytes per weight: mean 12; three turns into a basis or back 48; the second moment 20; root and direction 24; decay and step 16."""

QR_PRODUCTS = 8
"""Products of the same size that take as long as one QR decomposition, whose columns wait for each other."""

TIE = 1e-10
"""What breaks ties of the first basis, relative to the mean eigenvalue."""


class SOAP(Optimizer):
    """Adam in the eigenbasis of Shampoo's factors, for the layers' matrices; AdamW for other weights. Vyas et al. 2024, arXiv:2409.11321."""

    paper: ClassVar[str] = "arXiv:2409.11321"
    divides_stacks: ClassVar[bool] = False
    lr: float = Field(3e-3, gt=0, description="Peak learning rate; the schedule scales it.")
    beta1: float = Field(0.95, ge=0, lt=1, description="Decay of the running mean of gradients.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment and of the two factors.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    precondition_frequency: int = Field(10, ge=1, description="Steps between two updates of the eigenbases.")
    max_precond_dim: int = Field(
        10000, ge=0, description="A side of a matrix that is longer than this keeps its own basis."
    )

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """The layers' matrices, then the rest in AdamW's groups."""
        matrices = tuple(name for name, one in parameters.items() if one.kind == "matrix")
        rest = [name for name in parameters if name not in set(matrices)]
        soap = SOAPRule(self.beta1, self.beta2, self.eps, self.precondition_frequency, self.max_precond_dim)
        groups = [Group(matrices, soap, self.weight_decay)] if matrices else []
        return groups + by_decay(parameters, rest, AdamWRule(self.beta1, self.beta2, self.eps), self.weight_decay)

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Cost of two moments per weight, and of a factor and a basis for each side of a matrix that is not too long."""
        inside, sides, matmuls, largest, count = layer_matrix_params(dims), 0, [], 0, 0
        for layer in dims.layers:
            for rows, columns in layer.matrices or layer.matmuls:
                for side in (rows, columns):
                    if side <= self.max_precond_dim:
                        sides += side * side
                        other = columns if side == rows else rows
                        # Gradient and mean into the basis, the direction back, the factor; and a share of the basis' update.
                        matmuls += [(rows, columns, side)] * 3 + [(side, side, other)]
                        matmuls += [(side, side, -(-side * (1 + QR_PRODUCTS) // self.precondition_frequency))]
                largest, count = max(largest, rows * columns), count + 1
        repeats = inside / max(sum(layer.matmul_params for layer in dims.layers), 1)
        whole = 4.0 * inside + 2 * 4.0 * sides * repeats
        rest = dims.num_params - inside
        return UpdateCost(
            state_bytes=4.0 * inside + whole + ADAMW_STATE_BYTES * rest,
            moved_bytes=MOVED_BYTES * inside + ADAMW_MOVED_BYTES * rest,
            num_ops=ADAMW_OPS + 20 * count,
            work_bytes=4.0 * 5 * largest,
            matmuls=tuple(matmuls),
            num_repeats=repeats,
            whole_state_bytes=whole,
        )


@dataclass(frozen=True)
class SOAPRule(Rule):
    """Algorithm 3 of the paper, with Adam's bias correction; the matrices of a fused one, and of a stack of experts, are separate.

    As there, the first step only measures the first basis: no gradient is seen in a basis that was made of it. Tensor-parallel ranks
    each compute the whole step, from the gathered gradient and its gathered mean.
    """

    beta1: float
    beta2: float
    eps: float
    precondition_frequency: int
    max_precond_dim: int
    reads_whole: ClassVar[bool] = True
    whole_states: ClassVar[frozenset[str]] = frozenset(
        {"exp_avg_sq", "row_factor", "row_basis", "column_factor", "column_basis"}
    )

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """The mean as `weight`; of the whole matrix 'exp_avg_sq', in the basis, and flat factors and bases: squares of the row counts
        of its pieces, and of the columns, once for each piece."""
        shape = parameter.shape
        stacked, columns = math.prod(shape[:-2]), shape[-1]
        rows = parameter.pieces or (shape[-2],)
        side = stacked * sum(one * one for one in rows if one <= self.max_precond_dim)
        across = stacked * len(rows) * columns * columns * (columns <= self.max_precond_dim)
        return {
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": weight.new_zeros(shape),
            "row_factor": weight.new_zeros(side),
            "row_basis": weight.new_zeros(side),
            "column_factor": weight.new_zeros(across),
            "column_basis": weight.new_zeros(across),
        }

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """G and the mean M in the basis: G' = P^T G Q, M' = P^T M Q; V is the running mean of G'^2; W (1 - lr decay) - lr P (M' / (sqrt(V) + eps)) Q^T."""
        for entry in entries:
            part, state = entry.part, entry.state
            grad = entry.grad if part is None else part.join(entry.grad)
            rows = list(entry.parameter.pieces) or [grad.shape[-2]]
            frames = self._frames(entry, rows)
            if count == 1:
                for frame, piece in zip(frames, grad.split(rows, -2), strict=True):
                    frame.begin(piece, self.beta2)
                continue
            mean = state["exp_avg"].lerp_(entry.grad, 1 - self.beta1)
            mean = mean if part is None else part.join(mean)
            again, done, steps = (count - 1) % self.precondition_frequency == 0, count - 1, []
            pieces = (one.split(rows, -2) for one in (grad, mean, state["exp_avg_sq"]))
            for frame, piece, average, square in zip(frames, *pieces, strict=True):
                turned = frame.into(piece)
                square.mul_(self.beta2).addcmul_(turned, turned, value=1 - self.beta2)
                root = square.sqrt().div_((1 - self.beta2**done) ** 0.5).add_(self.eps)
                steps.append(frame.back(frame.into(average) / root))
                frame.see(piece, self.beta2)
                if again:
                    frame.turn()
            step = steps[0] if len(steps) == 1 else torch.cat(steps, -2)
            step = step if part is None else part.take(step)
            entry.weight.mul_(1 - lr * weight_decay).sub_(step, alpha=lr / (1 - self.beta1**done))

    def _frames(self, entry: Entry, rows: Sequence[int]) -> list[Frame]:
        """The frame of each piece, as views of the state."""
        shape, frames, at, across = entry.parameter.shape, [], 0, 0
        lead, columns = shape[:-2], shape[-1]
        for count in rows:
            sides: list[Side | None] = []
            for name, start, length in (("row", at, count), ("column", across, columns)):
                size = math.prod(lead) * length * length
                factor, basis = (entry.state[f"{name}_{kind}"][start : start + size] for kind in ("factor", "basis"))
                fits = length <= self.max_precond_dim
                square = (*lead, length, length)
                sides.append(Side(factor.view(square), basis.view(square)) if fits else None)
            frames.append(Frame(*sides))
            at += math.prod(lead) * count * count * (count <= self.max_precond_dim)
            across += math.prod(lead) * columns * columns * (columns <= self.max_precond_dim)
        return frames


class Side(NamedTuple):
    """One side of a matrix: Shampoo's factor, the running mean of G G^T (or G^T G), and about its eigenvectors, in columns."""

    factor: Tensor
    basis: Tensor


class Frame(NamedTuple):
    """The basis in which the moments of a matrix [..., rows, columns] are; a side that is None keeps its own."""

    row: Side | None
    column: Side | None

    def begin(self, grad: Tensor, beta: float) -> None:
        """The first factors and bases, from the first gradient."""
        self.see(grad, beta)
        wide = grad.double()
        for side, product in ((self.row, lambda: wide @ wide.mT), (self.column, lambda: wide.mT @ wide)):
            if side is None:
                continue
            # In float64, and with a small number that differs along the diagonal: the many eigenvalues of zero of a long side would leave
            # their eigenvectors to the rounding of sums, and every layout of the training would take another step.
            factor = product()
            size = factor.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(1e-300)
            ramp = torch.linspace(1, 2, factor.shape[-1], dtype=torch.float64, device=factor.device)
            factor = factor / size[..., None] + torch.diag_embed(TIE * ramp)
            side.basis.copy_(torch.linalg.eigh(factor).eigenvectors.flip(-1))

    def see(self, grad: Tensor, beta: float) -> None:
        """Adds a gradient to the running means."""
        if self.row is not None:
            self.row.factor.lerp_(grad @ grad.mT, 1 - beta)
        if self.column is not None:
            self.column.factor.lerp_(grad.mT @ grad, 1 - beta)

    def turn(self) -> None:
        """Algorithm 4: one power iteration, made orthogonal."""
        for side in self:
            if side is not None:
                side.basis.copy_(torch.linalg.qr(side.factor @ side.basis).Q)

    def into(self, matrix: Tensor) -> Tensor:
        """`matrix` in the basis."""
        matrix = matrix if self.row is None else self.row.basis.mT @ matrix
        return matrix if self.column is None else matrix @ self.column.basis

    def back(self, matrix: Tensor) -> Tensor:
        """`matrix` of the basis as one of rows and columns."""
        matrix = matrix if self.row is None else self.row.basis @ matrix
        return matrix if self.column is None else matrix @ self.column.basis.mT
