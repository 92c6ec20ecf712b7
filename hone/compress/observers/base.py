"""Base of the observers: each names the statistics that it reads and one of `hone.ops.rounding.ranges`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.inputs import Activations


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
