"""The range with the least squared error of the rounded inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.compress.observers.base import Observer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.inputs import Activations


class MSE(Observer):
    """Tries fractions of the range and keeps the one whose clipping and rounding lose least. Choukroun et al. 2019, arXiv:1902.06822."""

    paper: ClassVar[str] = "arXiv:1902.06822"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes", "histogram"})
    grouped: ClassVar[bool] = False
    histogram: ClassVar[str] = "histogram"
    """The statistic that weights the error of each value."""

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        from hone.ops.rounding import ranges

        return ranges.least_error(statistics["extremes"], statistics[self.histogram], activations)
