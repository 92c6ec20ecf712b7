"""The range that contains a given percentage of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.observers.base import Observer, counted

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.quantized.scheme import Activations


class Percentile(Observer):
    """Clips the largest magnitudes: the given percentage of inputs stays inside the range. Wu et al. 2020, arXiv:2004.09602."""

    paper: ClassVar[str] = "arXiv:2004.09602"
    needs: ClassVar[frozenset[str]] = frozenset({"histogram"})

    percentile: float = Field(
        99.99,
        gt=0,
        le=100,
        description="Percentage of inputs inside; of an asymmetric range half of the rest on each side.",
    )

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        values, counts = counted(statistics["histogram"])
        share = self.percentile / 100
        if activations.symmetric:
            order = values.abs().argsort(stable=True)
            edge = _quantile(values.abs()[order], counts[order], share)
            return -edge, edge
        return _quantile(values, counts, (1 - share) / 2), _quantile(values, counts, (1 + share) / 2)


def _quantile(values: Tensor, counts: Tensor, share: float) -> float:
    """The smallest of the ascending `values` with at least `share` of the counts at or below it."""
    below = counts.cumsum(0)
    return float(values[int((below < share * float(below[-1])).sum().clamp(max=len(values) - 1))])
