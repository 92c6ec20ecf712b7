"""Round to nearest: every weight to the closest point of its group's grid, without calibration data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.compress.quantizers.integer import IntegerQuantizer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix
    from hone.ops.rounding.integer_grid import Grid


class RoundToNearest(IntegerQuantizer):
    """Rounds each weight to the nearest point of its group's integer grid. The baseline of quantization papers."""

    scale: Literal["absmax", "signed", "search", "found"] = Field(  # type: ignore[assignment]
        "absmax",
        description="absmax: textbook; signed: full range, scale may be negative; search: least squared error; found: the grid on "
        "which the weights lie already, as after a training with learned steps.",
    )

    @model_validator(mode="after")
    def _found_is_symmetric(self) -> RoundToNearest:
        if self.scale == "found" and not self.symmetric:
            raise ValueError("scale found is for symmetric grids")
        return self

    def find_grid(self, matrix: Matrix, weights: Tensor | None = None) -> Grid:
        """As the base. Raises SpecError where weights lie on no grid and `scale` is found."""
        if self.scale != "found":
            return super().find_grid(matrix, weights)
        from hone.ops.rounding.found_grid import grid_of

        size = self.groups_of(matrix.original.shape[1])
        found = grid_of(matrix.weight if weights is None else weights, self.bits, size, self.as_dtype("float16"))
        if found is None:
            raise SpecError(
                f"{matrix.name}: its weights lie on no grid of {self.bits} bits and group_size {self.group_size}",
                fix="give bits and group_size of the training with learned steps that made it, or scale: absmax",
            )
        return found
