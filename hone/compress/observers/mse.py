"""The range with the least squared error of the rounded inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.compress.observers.base import Observer, counted, rounded

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.quantized.scheme import Activations

RATIOS = [2.0 ** (-step / 8) for step in range(57)]
"""Fractions of the whole range that are tried, down to 1/128."""


class MSE(Observer):
    """Tries fractions of the range and keeps the one whose clipping and rounding lose least. Choukroun et al. 2019, arXiv:1902.06822."""

    paper: ClassVar[str] = "arXiv:1902.06822"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes", "histogram"})
    grouped: ClassVar[bool] = False
    histogram: ClassVar[str] = "histogram"
    """The statistic that weights the error of each value."""

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        values, counts = counted(statistics[self.histogram])
        low, high = float(statistics["extremes"][:, 0].min()), float(statistics["extremes"][:, 1].max())

        def error(ends: tuple[float, float]) -> float:
            return float(((rounded(values, activations, *ends) - values).square() * counts).sum())

        best = min(((low * ratio, high * ratio) for ratio in RATIOS), key=error)
        if activations.symmetric:
            return best
        best = min(((best[0], high * ratio) for ratio in RATIOS), key=error)  # each end alone
        return min(((low * ratio, best[1]) for ratio in RATIOS), key=error)
