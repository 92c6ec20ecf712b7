"""Round to nearest: every weight to the closest point of its group's grid, without calibration data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.compress.quantizers.integer import IntegerQuantizer


class RoundToNearest(IntegerQuantizer):
    """Rounds each weight to the nearest point of its group's integer grid. The baseline of quantization papers."""

    scale: Literal["absmax", "signed", "search"] = Field(
        "absmax",
        description="absmax: textbook; signed: full range, scale may be negative; search: least squared error.",
    )
