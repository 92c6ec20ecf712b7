"""Magnitude pruning: the smallest weights of every matrix, of every row or of the whole model become zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from hone.compress.pruners.base import Pruner
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix


HISTOGRAM_BYTES = 190.0
"""Bytes a weight, at the rate of a large copy, to read the checkpoint twice and count magnitudes: 12 ns (two Intel Xeon cores)."""


class Magnitude(Pruner):
    """Zeroes the given fraction of weights, smallest magnitude first. Han et al. 2015, arXiv:1506.02626."""

    paper: ClassVar[str] = "arXiv:1506.02626"

    scope: Literal["matrix", "row", "global"] = Field(
        "matrix", description="Weights that share one threshold: a matrix, a row of it, or all matrices of the model."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Magnitude:
        if self.pattern != "none" and self.scope != "matrix":
            raise ValueError(
                f"pattern {self.pattern} compares neighbours alone, so scope={self.scope} would do nothing"
            )
        return self

    @property
    def reads_model(self) -> bool:
        return self.scope == "global"

    def prepare(self, weights: Callable[[], Iterator[Tensor]]) -> dict[str, float]:
        """`threshold`: the largest magnitude that goes; `tied`: the share that goes of the weights of that magnitude."""
        from hone.solvers import threshold

        found = threshold.smallest(weights, self.sparsity)
        return {"threshold": found.magnitude, "tied": found.tied}

    def apply(self, matrix: Matrix) -> None:
        from hone.solvers.threshold import Threshold

        sizes = matrix.weight.abs()
        if self.scope == "global":
            keep = Threshold(matrix.model["threshold"], matrix.model["tied"]).above(sizes.float())
        else:
            keep = self.largest_of(sizes, self.scope)
        matrix.prune(keep)

    def work(self, rows: int, columns: int) -> Work:
        """A selection and the mask, mostly the reading and writing of newly allocated memory."""
        found = Work(num_bytes=440.0 * rows * columns, num_ops=30, temporaries=12)
        if self.reads_model:
            return replace(found, num_bytes=found.num_bytes + HISTOGRAM_BYTES * rows * columns)
        return found
