"""GPTQ: quantize column by column and compensate each rounding error in the following columns.

Legend: N rows, K columns, H [K, K] mean of x x^T, R upper triangular with R R^T = H. The loop is in `hone.solvers.sweep`.

`sparsity` prunes in the same sweep, as SparseGPT (arXiv:2301.00774) does: a mask is chosen block by block from what zeroes
would cost there, survivors are rounded, and one error of both is compensated. The grid must be known before the sweep; it is
fitted to the weights that a sweep without rounding leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.compress.pruners.base import NofM, Sparse
from hone.compress.quantizers.integer import IntegerQuantizer
from hone.cost.compress.sweep import sweep_work
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix


class GPTQ(IntegerQuantizer, Sparse):
    """Rounds column by column and compensates each error in later columns. Frantar et al. 2022, arXiv:2210.17323."""

    paper: ClassVar[str] = "arXiv:2210.17323"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})

    damping: float = Field(0.01, gt=0, le=1, description="Added to H's diagonal, as a fraction of its mean.")
    act_order: bool = Field(
        True,
        description="Columns of large inputs first; groups are static (by position), so the file format is unchanged.",
    )
    sparsity: float = Field(
        0.0, ge=0.0, lt=1.0, description="Fraction of weights that become zero in the same sweep, as by sparsegpt."
    )
    pattern: NofM = Field(
        "none", description="N:M: of every M neighbouring weights of a row N stay; set sparsity=0.5 too."
    )

    @model_validator(mode="after")
    def _zeros_have_a_code(self) -> GPTQ:
        if self.sparsity and not self.symmetric:
            raise ValueError("sparsity needs symmetric grids: a pruned weight has code 0, which is not zero elsewhere")
        return self

    def apply(self, matrix: Matrix) -> None:
        from hone.model.quantized.scheme import Stored
        from hone.ops.rounding.api import Pruning
        from hone.solvers import sweep

        H = matrix.statistics["hessian"]
        if not self.symmetric and matrix.keep is not None:
            raise SpecError(
                f"{self.kind}: pruned weights and zero points at {matrix.name}: a pruned weight has code 0, zero another",
                fix="set symmetric=true, or quantize with rtn",
            )
        order = sweep.column_order(H.diagonal(), self.act_order, self.groups)
        R, notes = sweep.damped_factor(H[order][:, order], self.damping, "rounded to nearest")
        matrix.notes += notes
        prune = Pruning(R.diagonal(), self.sparsity, self.groups) if self.sparsity else None
        W, R = self.aims(matrix, R, order)
        shown = matrix.weight  # scales ignore pruned weights
        if prune is not None:
            shown = sweep.sparsify(W, R, prune, keep=matrix.keep, order=order)
        grid = self.find_grid(matrix, shown)
        Q = sweep.solve(grid.raised(W), R, grid.scales, self.bits, keep=matrix.keep, order=order, prune=prune)
        matrix.stored = Stored(self.scheme(Q.shape[1]), Q, *grid)

    def aims(self, matrix: Matrix, factor: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """The weights W [N, K] to round, and the factor of their error."""
        return matrix.current, factor

    def work(self, rows: int, columns: int) -> Work:
        """The search over scales, one Cholesky factor, and the sweep over columns; another sweep with `sparsity`."""
        sweeps = 2 if self.sparsity else 1
        group = self.groups.group if self.groups else 0
        return sweep_work(rows, columns, super().work(rows, columns), self.sparsity, group, sweeps)
