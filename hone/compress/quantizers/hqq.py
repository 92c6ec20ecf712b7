"""HQQ: grids that fit the weights of a group without its outliers, by half-quadratic splitting, without calibration data.

The turns of outliers and grid are in `hone.solvers.half_quadratic`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.integer import IntegerQuantizer
from hone.cost.work import Work

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix

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
        from hone.solvers.half_quadratic import fit_grid

        weights = matrix.weight
        options = {"iters": self.iters, "norm": self.norm, "beta": self.beta, "kappa": self.kappa}
        found = fit_grid(weights, self.find_grid(matrix), self.bits, **options)
        matrix.stored = self.scheme(weights.shape[1]).quantize(weights, *found)

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
