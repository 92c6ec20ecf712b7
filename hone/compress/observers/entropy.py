"""The range whose rounded inputs are distributed most like the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.compress.observers.base import Observer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.inputs import Activations


class Entropy(Observer):
    """Tries fractions of the range; keeps that of least Kullback-Leibler divergence of the rounded from the clipped histogram. Wu et al. 2020, arXiv:2004.09602."""

    paper: ClassVar[str] = "arXiv:2004.09602"
    needs: ClassVar[frozenset[str]] = frozenset({"extremes", "histogram"})
    grouped: ClassVar[bool] = False

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        from hone.ops.rounding import ranges

        return ranges.least_divergence(statistics["extremes"], statistics["histogram"], activations)
