"""Base of the observers, and what they share: the counted values of a histogram.

Shapes: V distinct values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.base.lazy import lazy
from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.quantized.scheme import Activations

torch = lazy("torch")
activations_of = lazy("hone.model.quantized.activations")


class Observer(Technique):
    """Chooses the range of inputs that a static scale represents; values outside are clipped. A subclass writes `range`.

    `needs` names the statistics of the calibration inputs that it reads (see `hone.compress.statistics`), and "gradients",
    which `hone.compress.gradients` measures on `gradient_sequences` before.
    """

    grouped: ClassVar[bool] = True
    """Whether it works for inputs whose groups have scales of their own, where the range fits all of them."""

    def range(self, statistics: Mapping[str, Tensor], activations: Activations) -> tuple[float, float]:
        """Smallest and largest input to represent, for the rounding `activations`."""
        raise NotImplementedError


def counted(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """(values float64 [V] in ascending order, counts float64 [V]) of a statistic by bfloat16 numbers, such as "histogram"."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()
    there = histogram.cpu() > 0
    values, counts = bits[there], histogram.cpu()[there].double()
    order = values.argsort(stable=True)
    return values[order], counts[order]


def rounded(values: Tensor, activations: Activations, low: float, high: float) -> Tensor:
    """`values` float64 [V] rounded with one static scale for inputs in [low, high]."""
    given = activations_of.static_tensors(activations, low, high)
    made = activations_of.round_inputs(values, activations, given)
    return made.values * made.scales
