"""SparseGPT: prune a matrix from its first columns to its last; later columns make up for what earlier ones lost.

The loop and its scores are in `hone.solvers.sweep`. A mask is chosen in each row by itself, as Wanda does and unlike the paper:
a threshold over all rows wipes out rows of small weights, and stacked matrices (q, k and v) would share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.compress.pruners.base import Pruner
from hone.cost.compress.sweep import sweep_work
from hone.cost.work import Work

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix


class SparseGPT(Pruner):
    """Zeroes the weights that cost least and updates the others to make up for it. Frantar et al. 2023, arXiv:2301.00774."""

    paper: ClassVar[str] = "arXiv:2301.00774"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})

    damping: float = Field(0.01, gt=0, le=1, description="Added to H's diagonal, as a fraction of its mean.")
    act_order: bool = Field(
        False,
        description="Columns of large inputs first. Without a pattern each 64 of them lose the same fraction, however large.",
    )

    def apply(self, matrix: Matrix) -> None:
        from hone.ops.rounding.api import Pruning
        from hone.solvers import sweep

        H = matrix.statistics["hessian"]
        order = sweep.column_order(H.diagonal(), self.act_order, self.groups)
        without = "pruned without an update of the other weights"
        R, notes = sweep.damped_factor(H[order][:, order], self.damping, without)
        matrix.notes += notes
        prune = Pruning(R.diagonal(), self.sparsity, self.groups)
        matrix.current = sweep.sparsify(matrix.current, R, prune, keep=matrix.keep, order=order)
        matrix.prune(matrix.current != 0)

    def work(self, rows: int, columns: int) -> Work:
        """One Cholesky factor and a sweep over the columns."""
        group = self.groups.group if self.groups else 0
        return sweep_work(rows, columns, Work(on_gpu=Work()), self.sparsity, group)
