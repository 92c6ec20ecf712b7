"""AutoRound: learns by signed gradient descent whether each weight is rounded up or down, and the scales.

Legend: N rows, K columns, G groups per row, g columns per group, H [K, K] mean of x x^T.

A weight w is rounded to the code round(w / s + v) with v in [-1/2, 1/2] learned, and s = s0 (1 + c) with c in
[-1/2, 1/2] learned for each group. The paper minimizes the change of a decoder layer's outputs, by backpropagation
through the layer; here it is the change of this linear's outputs, tr(E H E^T) for E = W' - W. Its gradient at W' is
2 E H, and rounding passes it on as if it had slope one. Rows do not depend on each other: each keeps its best turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.compress.matrix import Matrix
from hone.compress.quantizers.integer import IntegerQuantizer
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.grid import Grid

torch = lazy("torch")
formats = lazy("hone.ops.formats")
grid = lazy("hone.compress.grid")
schemes = lazy("hone.model.quantized.scheme")

TURN_BYTES = 200.0
"""Bytes a weight in one turn without the product, at the rate of a large copy: 10 ns on two Intel Xeon cores."""


class AutoRound(IntegerQuantizer):
    """Learns roundings and scales by signed gradient descent on the output error. Cheng et al. 2023, arXiv:2309.05516."""

    paper: ClassVar[str] = "arXiv:2309.05516"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})

    iters: int = Field(200, ge=1, description="Turns of gradient descent.")
    lr: float = Field(0.0, ge=0, description="Step of the first turn, which falls linearly to 0; 0 for 1 / iters.")
    learn_scales: bool = Field(True, description="Scales are learned as well, between half and one and a half times.")

    def apply(self, matrix: Matrix) -> None:
        hessian, start = matrix.statistics["hessian"], self.find_grid(matrix)
        descent = Descent(matrix.current, hessian, start, self.bits, matrix.keep)
        first = self.lr or 1.0 / self.iters
        for turn in range(self.iters):
            descent.turn(first * (1 - turn / self.iters), learn_scales=self.learn_scales)
        codes, found = descent.best()
        matrix.stored = schemes.Stored(self.scheme(codes.shape[1]), codes, *found)

    def work(self, rows: int, columns: int) -> Work:
        """The start, and for each turn a product with H and some thirty passes."""
        start, turns, size = super().work(rows, columns), self.iters + 1, rows * columns
        on_cpu, on_gpu = (
            Work(
                flops=2.0 * turns * size * columns,
                num_bytes=one.num_bytes + TURN_BYTES * turns * size,
                num_ops=one.num_ops + 40.0 * turns,
                temporaries=14,
            )
            for one in (start, start.on_gpu or start)
        )
        return replace(on_cpu, on_gpu=on_gpu)


class Descent:
    """Signed gradient descent on the roundings and scales of weights [N, K], from the nearest codes of `start`.

    Where `keep` bool [N, K] is False, weights stay zero and the others make up for it.
    """

    def __init__(self, weights: Tensor, hessian: Tensor, start: Grid, bits: int, keep: Tensor | None = None) -> None:
        self.shape = (*start.scales.shape, weights.shape[1] // start.scales.shape[1])
        self.weights = weights.reshape(self.shape)
        self.hessian = hessian.to(weights.dtype)
        self.start = start
        self.low, self.high = formats.code_range(bits)
        self.pruned = None if keep is None else ~keep.reshape(self.shape)
        self.offset = torch.zeros_like(self.weights)
        self.change = torch.zeros_like(start.scales, dtype=weights.dtype).unsqueeze(-1)
        self.least = torch.full((len(weights), 1, 1), float("inf"), dtype=weights.dtype, device=weights.device)
        self.codes = torch.empty(self.shape, dtype=torch.int8, device=weights.device)
        self.scales = start.scales.clone()

    def turn(self, step: float, *, learn_scales: bool) -> None:
        """Evaluates the current roundings, keeps each row's if they are its best, and takes a step."""
        scales, steps, values, inside, gradient = self._evaluate()
        if learn_scales:
            slope = values - (self.weights / steps).mul_(inside)
            slope = slope.mul_(gradient).sum(-1, keepdim=True).mul_(scales.sign().unsqueeze(-1))
            self.change.sub_(slope.sign_(), alpha=step).clamp_(-0.5, 0.5)
        direction = gradient.mul_(steps.sign()).mul_(inside).sign_()
        self.offset.sub_(direction, alpha=step).clamp_(-0.5, 0.5)

    def best(self) -> tuple[Tensor, Grid]:
        """Codes int8 [N, K] and grids of each row's best turn, the current one included."""
        self._evaluate()
        return self.codes.view(len(self.codes), -1), grid.Grid(self.scales, self.start.zero_points)

    def _evaluate(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(scales [N, G], steps [N, G, 1], codes less zero points, whether they were not clamped, gradient), [N, G, g]."""
        wide, zeros = self.start.wide(self.weights.dtype)
        scales = grid.stored((wide * (1 + self.change)).squeeze(-1), self.start.scales.dtype)
        steps = scales.to(wide.dtype).unsqueeze(-1)
        free = (self.weights / steps).add_(self.offset).add_(zeros).round_()
        codes = free.clamp(self.low, self.high)
        inside = free.eq_(codes)
        values = codes - zeros
        if self.pruned is not None:
            values.masked_fill_(self.pruned, 0)
            inside.masked_fill_(self.pruned, 0)
        error = (values * steps).sub_(self.weights)
        gradient = (error.flatten(1) @ self.hessian).view(self.shape)
        loss = error.mul_(gradient).sum((1, 2), keepdim=True)
        better = loss < self.least
        self.least = torch.where(better, loss, self.least)
        self.codes = torch.where(better, (values + zeros).to(torch.int8), self.codes)
        self.scales = torch.where(better.squeeze(-1), scales, self.scales)
        return scales, steps, values, inside, gradient
