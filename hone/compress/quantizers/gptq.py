"""GPTQ: quantize column by column and compensate each rounding error in the following columns.

Legend: N rows, K columns, H [K, K] mean of x x^T, R upper triangular with R R^T = H.

The layer's squared output error is ||E R||^2 for E = W - W'. Column j of E R is e_j R_jj + sum_{i<j} e_i R_ij, so
rounding w_j + sum_{i<j} e_i R_ij / R_jj makes it as small as the grid allows: this is GPTQ (its "updated weight" is
that sum) written as Babai's nearest plane, arXiv:2507.18553. It needs one Cholesky factor and no inverse.

SparseGPT (arXiv:2301.00774) is the same sweep with zero in place of the grid for some weights. `sparsity` does both at once:
a mask is chosen block by block from what zeroes would cost there, survivors are rounded, and one error of both is
compensated. The grid must be known before the sweep; it is fitted to the weights that a sweep without rounding leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.spec import Quiet
from hone.compress.matrix import Matrix
from hone.compress.pruners.base import NofM, Sparse
from hone.compress.quantizers.integer import IntegerQuantizer
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.ops.rounding.api import Pruning
    from hone.ops.rounding.selection import Pattern

torch = lazy("torch")
formats = lazy("hone.ops.formats")
rounding = lazy("hone.ops.rounding.api")
schemes = lazy("hone.model.quantized.scheme")

COLUMN_OPS, BLOCK_LAUNCHES = 17, 12
"""Cost in operation starts: of one column without a GPU, five operations and the slices between them; of 64 columns with
one, a product, a kernel and the Python around them."""

LOOP_BYTES = 300.0
"""Bytes a weight of a sweep, at the rate of a large copy."""

BLOCK_MASK, GROUP_MASK = (800.0, 100), (100.0, 170)
"""Cost of choosing masks without a GPU: bytes a weight, by 64 columns at once or by each column of a pattern's group, and
operation starts of one choice (one of two Intel Xeon cores: 50 ns a weight; 2:4, 3072 rows: 44 ns)."""

GPU_MASK = (100.0, 25)
"""The same for 64 columns on a GPU, counted, not measured; masks of a pattern are chosen in the sweep's own kernel."""


class GPTQ(IntegerQuantizer, Sparse):
    """Rounds column by column and compensates each error in later columns. Frantar et al. 2022, arXiv:2210.17323."""

    paper: ClassVar[str] = "arXiv:2210.17323"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian"})

    damping: float = Field(0.01, gt=0, le=1, description="Added to H's diagonal, as a fraction of its mean.")
    act_order: bool = Field(
        True,
        description="Columns of large inputs first; groups are static (by position), so the file format is unchanged.",
    )
    sparsity: Annotated[float, Quiet()] = Field(
        0.0, ge=0.0, lt=1.0, description="Fraction of weights that become zero in the same sweep, as by sparsegpt."
    )
    pattern: Annotated[NofM, Quiet()] = Field(
        "none", description="N:M: of every M neighbouring weights of a row N stay; set sparsity=0.5 too."
    )

    @model_validator(mode="after")
    def _zeros_have_a_code(self) -> GPTQ:
        if self.sparsity and not self.symmetric:
            raise ValueError("sparsity needs symmetric grids: a pruned weight has code 0, which is not zero elsewhere")
        return self

    def apply(self, matrix: Matrix) -> None:
        hessian = matrix.statistics["hessian"]
        if not self.symmetric and matrix.keep is not None:
            raise SpecError(
                f"{self.kind}: pruned weights and zero points at {matrix.name}: a pruned weight has code 0, zero another",
                fix="set symmetric=true, or quantize with rtn",
            )
        order = column_order(hessian.diagonal(), self.act_order, self.groups)
        factor = factor_of(matrix, order, self.damping, "rounded to nearest")
        prune = rounding.Pruning(factor.diagonal(), self.sparsity, self.groups) if self.sparsity else None
        wanted, factor = self._aims(matrix, factor, order)
        shown = matrix.weight  # scales ignore pruned weights
        if prune is not None:
            shown = sparsify(wanted, factor, prune, keep=matrix.keep, order=order)
        found = self.find_grid(matrix, shown)
        codes = solve(found.raised(wanted), factor, found.scales, self.bits, keep=matrix.keep, order=order, prune=prune)
        matrix.stored = schemes.Stored(self.scheme(matrix.original.shape[1]), codes, *found)

    def _aims(self, matrix: Matrix, factor: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [N, K] to round, and the factor of their error."""
        return matrix.current, factor

    def work(self, rows: int, columns: int) -> Work:
        """The search over scales, one Cholesky factor, and the sweep over columns; another sweep with `sparsity`."""
        sweeps = 2 if self.sparsity else 1
        return sweep_work(rows, columns, super().work(rows, columns), self.sparsity, self.groups, sweeps)


def sweep_work(rows: int, columns: int, before: Work, sparsity: float, groups: Pattern | None, sweeps: int = 1) -> Work:
    """`before`, one Cholesky factor, and each sweep: half a matrix product, the column loop and the choice of masks."""
    blocks, none = columns / 64, (0.0, 0)
    masks, choices, gpu_masks = (BLOCK_MASK, blocks, GPU_MASK) if sparsity else (none, 0.0, none)
    if sparsity and groups is not None:
        masks, choices = (GROUP_MASK[0] * groups.group, GROUP_MASK[1]), columns / groups.group
        gpu_masks = none
    assert before.on_gpu is not None
    on_cpu, on_gpu = (
        replace(
            one,
            flops=columns**3 / 3 + sweeps * rows * columns**2,
            num_bytes=one.num_bytes + sweeps * (LOOP_BYTES + chosen[0]) * rows * columns,
            num_ops=one.num_ops + sweeps * (ops + chosen[1] * count),
        )
        for one, ops, chosen, count in (
            (before, COLUMN_OPS * columns, masks, choices),
            (before.on_gpu, BLOCK_LAUNCHES * blocks, gpu_masks, blocks),
        )
    )
    return replace(on_cpu, on_gpu=on_gpu)


def column_order(diagonal: Tensor, act_order: bool, groups: Pattern | None = None) -> Tensor:
    """Int64 [K]: columns of large `diagonal` [K] first if `act_order`; the columns of a pattern's group stay neighbours."""
    size = groups.group if groups is not None else 1
    places = torch.arange(len(diagonal), device=diagonal.device).view(-1, size)
    if act_order:
        places = places[torch.argsort(diagonal.reshape(-1, size).sum(1), descending=True, stable=True)]
    return places.flatten()


def factor_of(matrix: Matrix, order: Tensor, damping: float, otherwise: str) -> Tensor:
    """R [K, K] of the Hessian of `matrix` with columns in `order`; more damping, then float64, when H is not positive definite.

    When that does not help, R is diag(H)^(1/2), with which nothing is compensated; `otherwise` says in the matrix's notes
    what happens then.
    """
    hessian = matrix.statistics["hessian"][order][:, order]
    for dtype in dict.fromkeys((hessian.dtype, torch.float64)):
        used = damping
        while used <= 1.0:
            factor = upper_factor(hessian.to(dtype), used)
            if factor is not None:
                if used > damping:
                    matrix.notes.append(f"damping raised to {used:g}")
                return factor.to(hessian.dtype)
            used *= 10
    matrix.notes.append(f"no Cholesky factor at any damping: {otherwise}")
    return hessian.diagonal().clamp(min=torch.finfo(hessian.dtype).tiny).sqrt().diag()


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
    prune: Pruning | None = None,
) -> Tensor:
    """Codes int8 [N, K] for weights [N, K] on the grid of scales [N, G], errors propagated by `factor` (R, [K, K]).

    `order` int64 [K] is the order in which columns are rounded (R is that of the permuted H). `keep` bool [N, K] forces
    code 0 where False, and that error is propagated like any other (arXiv:2301.00774); `prune` chooses more such weights.
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
        prune=prune,
    )
    return _in_file_order(codes, order)


def sparsify(
    weights: Tensor, factor: Tensor, prune: Pruning, *, keep: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Weights [N, K] with zeros where `keep` is False or `prune` chooses, and the others updated to make up for them.

    `factor`, `keep` and `order` as for `solve`.
    """
    from hone.ops import prune_compensated

    order = torch.arange(weights.shape[1], device=weights.device) if order is None else order
    kept = None if keep is None else keep.T[order]
    values = prune_compensated(weights.T[order].contiguous(), factor / factor.diagonal(), prune, kept)
    return _in_file_order(values, order)


def _in_file_order(solved: Tensor, order: Tensor) -> Tensor:
    """[N, K] from the columns [K, N] in the order in which they were solved."""
    result = torch.empty_like(solved)
    result[order] = solved
    return result.T.contiguous()
