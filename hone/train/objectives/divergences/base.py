"""The base of divergences: a name and a weight, from which the loss over the heads computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.base.table import Technique

if TYPE_CHECKING:
    from hone.ops.loss.divergence import Divergence as Computed


class Divergence(Technique):
    """A divergence of the student's distribution q from the teacher's p; zero where they are equal."""

    @property
    def weight(self) -> float:
        """Its share of one of the two in what they are compared with; 0: it has none."""
        return 0.0

    def computed(self) -> Computed:
        """As `hone.ops.linear_cross_entropy` takes it."""
        from hone.ops.loss.divergence import Divergence as Computed

        return Computed(self.kind, self.weight)  # type: ignore[arg-type]
