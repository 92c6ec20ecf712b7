"""Magnitude pruning: the smallest weights of every matrix become zero."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hone.base.figure import Estimate
from hone.compress.matrix import Matrix, Step


class Magnitude(Step):
    """Zeroes the given fraction of each matrix's weights, smallest magnitude first. Han et al. 2015, arXiv:1506.02626."""

    paper: ClassVar[str] = "arXiv:1506.02626"
    gives: ClassVar[frozenset[str]] = frozenset({"weights:sparse"})

    sparsity: float = Field(0.5, ge=0.0, lt=1.0, description="Fraction of each matrix's weights that become zero.")

    def apply(self, matrix: Matrix) -> None:
        weights = matrix.weight
        count = round(self.sparsity * weights.numel())
        # A stable sort, so that equal magnitudes give the same mask on every run and machine.
        order = weights.abs().flatten().argsort(stable=True)
        keep = weights.new_ones(weights.numel(), dtype=bool)
        keep[order[:count]] = False
        matrix.prune(keep.view(weights.shape))

    def estimates(self, **facts: Any) -> dict[str, Estimate]:
        """sparsity of the pruned matrices."""
        return {"sparsity": Estimate(value=self.sparsity, unit="fraction", formula="the fraction asked for")}
