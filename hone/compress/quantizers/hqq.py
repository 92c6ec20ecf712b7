"""HQQ: grids that fit the weights of a group without its outliers, by half-quadratic splitting, without calibration data.

Legend: n rows, G groups per row, g columns per group.

The error w - w' is split into outliers o and a rest. In turn o is the proximal point of |o|^p at the error, with a few
large values for p < 1, and the grid is the one that fits w - o best with the codes that w has. Errors are measured in
steps of the grid, so that beta means the same for weights of any size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hone.base.errors import SpecError
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

CPU_BYTES, GPU_BYTES = 320.0, 160.0
"""Bytes a weight in one turn, at the rate of a large copy: 15 ns on two Intel Xeon cores, most of it the powers; the
tensors that a GPU reads and writes."""


class HQQ(IntegerQuantizer):
    """Fits scales (and zero points) to the weights of a group without its outliers. Badri and Shaji 2023, half-quadratic quantization."""

    scale: Literal["absmax", "signed", "search"] = Field("absmax", description="The grid of the first turn, see rtn.")
    iters: int = Field(20, ge=0, description="Turns of outliers and grid.")
    norm: float = Field(0.7, gt=0, le=1, description="p of |error|^p, which the grid minimizes.")
    beta: float = Field(10.0, gt=0, description="Penalty of the split in the first turn; larger: fewer outliers.")
    kappa: float = Field(1.01, ge=1, description="Growth of the penalty from one turn to the next.")

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.symmetric and self.bits == 2 and self.scale == "absmax":  # perplexity 5.9 -> 1,296 on reference-29m
            raise SpecError(
                f"{self.kind}: with 2 bits and scales that are all positive, codes -2 to 1 cut off large positive weights alone, "
                "which shifts every output",
                fix="set scale=search, or symmetric=false, or use gptq",
            )
        super().check(name, rows, columns)

    def apply(self, matrix: Matrix) -> None:
        weights, start = matrix.weight, self.find_grid(matrix)
        num_groups, rows = start.scales.shape[1], grid.chunk_rows(weights)
        found = []
        for begin in range(0, len(weights), rows):
            part = slice(begin, begin + rows)
            groups = weights[part].reshape(-1, num_groups, weights.shape[1] // num_groups)
            found.append(self.fit(groups, start.rows(part)))
        matrix.stored = self.scheme(weights.shape[1]).quantize(weights, *grid.join(found))

    def fit(self, groups: Tensor, start: Grid) -> Grid:
        """The grids [n, G] of weights [n, G, g] with the least sum of |error|^p of all turns, `start` included."""
        low, high = formats.code_range(self.bits)
        now = start
        best, least, beta = start, None, self.beta
        for turn in range(self.iters + 1):
            steps, zeros = now.wide(groups.dtype)
            codes = (groups / steps + zeros).round_().clamp_(low, high)
            error = groups - (codes - zeros) * steps
            size = error.abs().pow_(self.norm).sum(-1)
            if least is None:
                least = size
            else:
                better = size < least
                best, least = now.where(better, best), torch.where(better, size, least)
            if turn == self.iters:
                break
            aim = groups - shrink(error / steps, beta, self.norm) * steps
            now = self._refit(aim, codes, now, low, high)
            beta *= self.kappa
        return best

    def _refit(self, aim: Tensor, codes: Tensor, now: Grid, low: int, high: int) -> Grid:
        """The grids that fit `aim` [n, G, g] best with `codes`: the zero points for the scales, then the scales."""
        steps, zeros = now.wide(aim.dtype)
        points = None
        if now.zero_points is not None:
            zeros = (codes - aim / steps).mean(-1, keepdim=True).round_().clamp_(low, high)
            points = zeros.squeeze(-1).to(torch.int8)
        values = codes - zeros
        norm = values.square().sum(-1)
        scales = torch.where(norm > 0, (values * aim).sum(-1) / norm, steps.squeeze(-1))
        return grid.Grid(grid.stored(scales, now.scales.dtype), points)

    def work(self, rows: int, columns: int) -> Work:
        """The start, and for each turn two powers of every weight and some fifteen passes."""
        start = super().work(rows, columns)
        on_cpu, on_gpu = (
            Work(
                num_bytes=one.num_bytes + each * self.iters * rows * columns,
                num_ops=one.num_ops + 30 * self.iters,
                temporaries=10,
            )
            for one, each in ((start, CPU_BYTES), (start.on_gpu or start, GPU_BYTES))
        )
        return replace(on_cpu, on_gpu=on_gpu)


def shrink(error: Tensor, beta: float, norm: float) -> Tensor:
    """The proximal point of |x|^p / beta at `error`, in its generalized form: sign(e) max(|e| - |e|^(p-1) / beta, 0)."""
    size = error.abs()
    less = size.pow(norm - 1).div_(beta)  # infinite at 0, which stays 0
    return (size - less).clamp_(min=0).mul_(error.sign())
