"""The range that contains a given percentage of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.observers.base import Observer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.inputs import Activations


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
        from hone.ops.rounding import ranges

        share = self.percentile / 100
        return ranges.percentile(statistics["histogram"], share, symmetric=activations.symmetric)
