"""Round to nearest: every weight to the closest point of its group's grid, no data needed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.compress.matrix import Matrix, Quantizer

formats = lazy("hone.ops.formats")
grid = lazy("hone.compress.grid")


class RoundToNearest(Quantizer):
    """Rounds each weight to the nearest point of a symmetric integer grid. The baseline of every quantization paper."""

    scale: Literal["absmax", "signed", "search"] = Field(
        "absmax",
        description="absmax: textbook; signed: full range, scale may be negative; search: least squared error.",
    )

    def apply(self, matrix: Matrix) -> None:
        importance = None if matrix.hessian is None else matrix.hessian.diagonal()
        weights = matrix.weight
        dtype, size = self.stored_scale_dtype(matrix.stored_dtype), self.groups_of(matrix.original.shape[1])
        matrix.scales = grid.find_scales(weights, self.bits, size, self.scale, dtype, importance)
        matrix.codes = formats.quantize(weights, matrix.scales, self.bits)
