"""Wanda: the weights that change the outputs least become zero, without an update of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hone.compress.pruners.base import Pruner
from hone.cost.work import Work

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix

SELECT_BYTES = 400.0
"""Bytes a weight, at the rate of a large copy, to select from its row and write the mask: 27 ns (one of two Intel Xeon cores)."""


class Wanda(Pruner):
    """Zeroes the fraction of each row with the smallest |weight| times norm of its input. Sun et al. 2023, arXiv:2306.11695."""

    paper: ClassVar[str] = "arXiv:2306.11695"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "meansquare"})

    def apply(self, matrix: Matrix) -> None:
        scores = matrix.weight.abs() * matrix.statistics["meansquare"].sqrt()
        matrix.prune(self.largest_of(scores, "row"))

    def work(self, rows: int, columns: int) -> Work:
        """A selection from each row, and the mask."""
        return Work(num_bytes=SELECT_BYTES * rows * columns, num_ops=20, temporaries=12)
