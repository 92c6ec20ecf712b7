"""GPTQ: quantize column by column and compensate each rounding error in the following columns.

Legend: N rows, K columns, H [K, K] mean of x x^T, R upper triangular with R R^T = H.

The layer's squared output error is ||E R||^2 for E = W - W'. Column j of E R is e_j R_jj + sum_{i<j} e_i R_ij, so
rounding w_j + sum_{i<j} e_i R_ij / R_jj makes it as small as the grid allows: this is GPTQ (its "updated weight" is
that sum) written as Babai's nearest plane, arXiv:2507.18553. It needs one Cholesky factor and no inverse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.compress.matrix import IntegerQuantizer, Matrix
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")
formats = lazy("hone.ops.formats")
schemes = lazy("hone.model.quantized.scheme")

COLUMN_OPS, BLOCK_LAUNCHES = 17, 12
"""Cost in operation starts: of one column without a GPU, five operations and the slices between them; of 64 columns with
one, a product, a kernel and the Python around them."""


class GPTQ(IntegerQuantizer):
    """Rounds column by column and compensates each error in later columns. Frantar et al. 2022, arXiv:2210.17323."""

    paper: ClassVar[str] = "arXiv:2210.17323"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})

    damping: float = Field(0.01, gt=0, le=1, description="Added to H's diagonal, as a fraction of its mean.")
    act_order: bool = Field(
        True,
        description="Columns of large inputs first; groups are static (by position), so the file format is unchanged.",
    )

    def apply(self, matrix: Matrix) -> None:
        hessian = matrix.statistics["hessian"]
        scheme, found = self.scheme(matrix.original.shape[1]), self.find_grid(matrix)  # scales ignore pruned weights
        if matrix.keep is not None and found.zero_points is not None:
            raise SpecError(
                f"{self.kind}: pruned weights and zero points at {matrix.name}: a pruned weight has code 0, zero another",
                fix="set symmetric=true, or quantize with rtn",
            )
        factor, order, damping = self._factor(hessian)
        if factor is None:
            matrix.notes.append("no Cholesky factor at any damping: rounded to nearest")
            matrix.stored = scheme.quantize(matrix.weight, *found)
            return
        if damping > self.damping:
            matrix.notes.append(f"damping raised to {damping:g}")
        wanted, factor = self._aims(matrix, factor, order)
        codes = solve(found.raised(wanted), factor, found.scales, self.bits, keep=matrix.keep, order=order)
        matrix.stored = schemes.Stored(scheme, codes, *found)

    def _aims(self, matrix: Matrix, factor: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [N, K] to round, and the factor of their error."""
        return matrix.current, factor

    def work(self, rows: int, columns: int) -> Work:
        """The search over scales, one Cholesky factor, half a matrix product, and the column loop."""
        search = super().work(rows, columns)
        loop = Work(flops=columns**3 / 3 + rows * columns**2, num_bytes=300.0 * rows * columns)
        on_cpu, on_gpu = (
            replace(loop, num_bytes=loop.num_bytes + one.num_bytes, num_ops=one.num_ops + ops)
            for one, ops in ((search, COLUMN_OPS * columns), (search.on_gpu, BLOCK_LAUNCHES * columns / 64))
        )
        return replace(on_cpu, on_gpu=on_gpu)

    def _factor(self, hessian: Tensor) -> tuple[Tensor | None, Tensor, float]:
        """(R or None, column order, damping used); more damping, then float64, when H is not positive definite."""
        diagonal = hessian.diagonal()
        if self.act_order:
            order = torch.argsort(diagonal, descending=True, stable=True)
            hessian = hessian[order][:, order]
        else:
            order = torch.arange(len(diagonal), device=hessian.device)
        for dtype in dict.fromkeys((hessian.dtype, torch.float64)):
            damping = self.damping
            while damping <= 1.0:
                factor = upper_factor(hessian.to(dtype), damping)
                if factor is not None:
                    return factor.to(hessian.dtype), order, damping
                damping *= 10
        return None, order, self.damping


def upper_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """Upper triangular R with R R^T = H + damping * mean(diag H) * I; None when that is not positive definite.

    Columns whose inputs are always zero (zero on the diagonal) are rounded to nearest.
    """
    damped = hessian.clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    diagonal.add_(damping * mean)
    diagonal.masked_fill_(diagonal <= 0, 1.0)
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if bool(failed) or not bool(torch.isfinite(lower).all()):
        return None
    return lower.flip(0, 1)


def solve(
    weights: Tensor,
    factor: Tensor,
    scales: Tensor,
    bits: int,
    *,
    keep: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Codes int8 [N, K] for weights [N, K] on the grid of scales [N, G], errors propagated by `factor` (R, [K, K]).

    `order` int64 [K] is the order in which columns are rounded (R is that of the permuted H). `keep` bool [N, K] forces
    code 0 where False, and that error is propagated like any other (arXiv:2301.00774).
    """
    from hone.ops import round_compensated

    columns = weights.shape[1]
    order = torch.arange(columns, device=weights.device) if order is None else order
    steps = scales.to(weights.dtype).T[order // (columns // scales.shape[1])]  # [K, N]: a column's scale of every row
    codes = round_compensated(
        weights.T[order].contiguous(),  # transposed, so that a column is contiguous
        steps,
        factor / factor.diagonal(),
        *formats.code_range(bits),
        None if keep is None else keep.T[order],
    )
    result = torch.empty(columns, len(weights), dtype=torch.int8, device=weights.device)
    result[order] = codes
    return result.T.contiguous()
