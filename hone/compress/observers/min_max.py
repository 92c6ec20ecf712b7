"""The range of all inputs seen in calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.compress.observers.base import Observer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.inputs import Activations


class MinMax(Observer):
    """The smallest and largest input: nothing in the calibration data is clipped. Jacob et al. 2017, arXiv:1712.05877."""

    paper: ClassVar[str] = "arXiv:1712.05877"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes"})

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        from hone.ops.rounding import ranges

        return ranges.whole(statistics["extremes"])
