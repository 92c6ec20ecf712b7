"""Round to nearest: every weight to the closest point of its group's grid, without calibration data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.base.lazy import lazy
from hone.compress.matrix import IntegerQuantizer, Matrix

grid = lazy("hone.compress.grid")


class RoundToNearest(IntegerQuantizer):
    """Rounds each weight to the nearest point of a symmetric integer grid. The baseline of quantization papers."""

    scale: Literal["absmax", "signed", "search"] = Field(
        "absmax",
        description="absmax: textbook; signed: full range, scale may be negative; search: least squared error.",
    )

    def apply(self, matrix: Matrix) -> None:
        hessian = matrix.statistics.get("hessian")
        weights, scheme = matrix.weight, self.scheme(matrix.original.shape[1])
        dtype = self.stored_scale_dtype(matrix.stored_dtype)
        importance = None if hessian is None else hessian.diagonal()
        scales = grid.find_scales(weights, self.bits, scheme.group_size, self.scale, dtype, importance)
        matrix.stored = scheme.quantize(weights, scales)
