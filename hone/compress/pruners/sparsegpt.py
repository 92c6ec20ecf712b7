"""SparseGPT: prune a matrix from its first columns to its last; later columns make up for what earlier ones lost.

Legend: N rows, K columns, H [K, K] mean of x x^T, R upper triangular with R R^T = H (see hone.compress.quantizers.gptq).

A weight that becomes zero adds (R_jj t_j)^2 to the squared output error, where t_j is the weight plus the compensation of the
columns before. That is the paper's score t_j^2 / [H_j^-1]_jj, whose inverse has those columns eliminated: [H_j^-1]_jj is
1 / R_jj^2. A mask is chosen for every block of columns once the errors of the blocks before are compensated; in each row by
itself, as Wanda does and unlike the paper: a threshold over all rows wipes out rows of small weights, and stacked
matrices (q, k and v) would share it.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.compress.matrix import Matrix
from hone.compress.pruners.base import Pruner
from hone.compress.quantizers.gptq import column_order, factor_of, sparsify, sweep_work
from hone.cost.compress import Work

rounding = lazy("hone.ops.rounding.api")


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
        order = column_order(matrix.statistics["hessian"].diagonal(), self.act_order, self.groups)
        factor = factor_of(matrix, order, self.damping, "pruned without an update of the other weights")
        prune = rounding.Pruning(factor.diagonal(), self.sparsity, self.groups)
        matrix.current = sparsify(matrix.current, factor, prune, keep=matrix.keep, order=order)
        matrix.prune(matrix.current != 0)

    def work(self, rows: int, columns: int) -> Work:
        """One Cholesky factor and a sweep over the columns."""
        return sweep_work(rows, columns, Work(on_gpu=Work()), self.sparsity, self.groups)
