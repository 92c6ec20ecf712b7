"""Int8 in two-dimensional blocks: every weight to the nearest of 256 steps of a scale that its block of rows and columns shares.

Shapes: N output features (rows), K input features (columns), [R, G] the scales: R blocks of rows by G blocks of columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.base import Quantizer
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix
    from hone.compress.targets import Linear
    from hone.model.quantized.scheme import Scheme

SMALLEST = 8
"""Smaller blocks would store a scale for less than 64 codes."""


class BlockInt8(Quantizer):
    """Rounds to 8-bit integers with one scale a block of rows and columns. Xi et al. 2024 (Jetfire), arXiv:2403.12422.

    A scale of 16 bits costs 16 / block_size^2 bits a weight: 0.004 with 64 x 64. A block stays a block when the matrix is
    transposed, so that one code serves the forward and the backward product of training; DeepSeek-V3 (arXiv:2412.19437) has
    blocks of fp8 for it. A linear runs as one of int8 in groups of block_size columns, with each scale repeated for the block's rows.
    """

    paper: ClassVar[str] = "arXiv:2403.12422"

    block_size: int = Field(64, ge=SMALLEST, description="Rows, and columns, of a block that shares a scale.")
    scale: Literal["absmax", "signed", "search"] = Field(
        "absmax",
        description="absmax: textbook; signed: full range, scale may be negative; search: least squared error.",
    )

    @property
    def note(self) -> str:
        return "int8 in blocks: transformers with compressed-tensors loads it, vLLM takes blocks of fp8 alone"

    def scheme(self, columns: int) -> Scheme:
        from hone.model.quantized.scheme import Scheme

        block = (self.block_size, self.block_size)
        return Scheme(8, layout="int-quantized", block=block, activations=self.rounding)

    def check(self, name: str, rows: int, columns: int) -> None:
        size = self.block_size
        if rows % size or columns % size:
            sizes = [str(one) for one in (128, 64, 32, 16, 8) if rows % one == 0 and columns % one == 0]
            raise SpecError(
                f"{self.kind}: blocks of {size} x {size} do not divide {name}, {rows} x {columns}",
                fix=f"use block_size {' or '.join(sizes)}, or leave this matrix out with ignore"
                if sizes
                else "use kind=rtn with bits=8 and group_size=0, or leave this matrix out with ignore",
            )
        super().check(name, rows, columns)

    def check_linear(self, name: str, linear: Linear) -> None:
        for module, rows in linear.modules:  # no block lies in two of them
            self.check(module, rows, linear.columns)
        super().check_linear(name, linear)

    def apply(self, matrix: Matrix) -> None:
        """Finds the grid of each block as of a row of N K / (R G) weights, then rounds."""
        from hone.ops.rounding.integer_grid import find_grid, find_scales

        scheme, (rows, columns) = self.scheme(matrix.weight.shape[1]), matrix.weight.shape
        down, across = scheme.grid(rows, columns)
        wide = self.as_dtype("float32")

        def blocks(weights: Tensor) -> Tensor:
            """[N, K] as [R * G, weights of a block]."""
            size = self.block_size
            return weights.reshape(down, size, across, size).transpose(1, 2).reshape(down * across, size * size)

        def scales() -> Tensor:
            return find_scales(blocks(matrix.original), 8, 0, "absmax", wide)

        found = find_grid(blocks(matrix.weight), 8, 0, self.scale, self.scale_dtype_of(matrix, scales))
        matrix.stored = scheme.quantize(matrix.weight, found.scales.view(down, across))

    def work(self, rows: int, columns: int) -> Work:
        """As rounding in groups, after a copy of the blocks."""
        passes = 40 if self.scale == "search" else 1
        size, starts = rows * columns, passes * 12
        on_gpu = Work(num_bytes=(passes * 64.0 + 16) * size, num_ops=starts)
        return Work(num_bytes=(passes * 22.0 + 16) * size, num_ops=starts, on_gpu=on_gpu)
