"""Signed gradient descent on roundings and scales: the output error of one matrix, as AutoRound minimizes it. arXiv:2309.05516.

Legend: N rows, K columns, G groups per row, g columns per group, H [K, K] mean of x x^T.

A weight w is rounded to the code round(w / s + v) with v in [-1/2, 1/2] learned, and s = s0 (1 + c) with c in
[-1/2, 1/2] learned for each group. The paper minimizes the change of a decoder layer's outputs, by backpropagation
through the layer; here it is the change of this linear's outputs, tr(E H E^T) for E = W' - W. Its gradient at W' is
2 E H, and rounding passes it on as if it had slope one. Rows do not depend on each other: each keeps its best turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.formats import code_range
from hone.ops.rounding.integer_grid import Grid, stored


class Descent:
    """Signed gradient descent on the roundings and scales of weights [N, K], from the nearest codes of `start`.

    Where `keep` bool [N, K] is False, weights stay zero and the others make up for it.
    """

    def __init__(self, weights: Tensor, hessian: Tensor, start: Grid, bits: int, keep: Tensor | None = None) -> None:
        self.shape = (*start.scales.shape, weights.shape[1] // start.scales.shape[1])
        self.weights = weights.reshape(self.shape)
        self.hessian = hessian.to(weights.dtype)
        self.start = start
        self.low, self.high = code_range(bits)
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
        return self.codes.view(len(self.codes), -1), Grid(self.scales, self.start.zero_points)

    def _evaluate(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(scales [N, G], steps [N, G, 1], codes less zero points, whether they were not clamped, gradient), [N, G, g]."""
        wide, zeros = self.start.wide(self.weights.dtype)
        scales = stored((wide * (1 + self.change)).squeeze(-1), self.start.scales.dtype)
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
