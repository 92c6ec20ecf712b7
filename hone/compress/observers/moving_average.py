"""The moving average of the ranges of calibration batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.observers.base import Observer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.inputs import Activations


class MovingAverage(Observer):
    """Averages the smallest and largest input of each batch with falling weights: outliers of a batch are clipped. Jacob et al. 2017, arXiv:1712.05877."""

    paper: ClassVar[str] = "arXiv:1712.05877"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes"})

    momentum: float = Field(
        0.01, gt=0, le=1, description="Weight of a new batch; the range depends on batch_size and order of the batches."
    )

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        from hone.ops.rounding import ranges

        return ranges.moving_average(statistics["extremes"], self.momentum)
