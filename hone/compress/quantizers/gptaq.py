"""GPTAQ: GPTQ that also makes up for what the layers before have changed in a layer's inputs.

Legend: N rows, K columns, X [K, T] inputs in the compressed model, D [K, T] the same in the model that is not compressed,
H = X X^T, U upper triangular with U^T U = H^-1, R = U^-1 (so that R R^T = H).

GPTQ keeps W' X near W X; here W' X is to be near W D. The paper rounds column j of w to q_j and then updates
w_k -= (w_j - q_j) U_jk / U_jj - w_j P_jk for every later k, with P = ((D - X) X^T U^T, above the diagonal) U.
The rounded values t_j are linear in w and q: t (I + A - P) = w + q A with A = U / diag(U) above the diagonal. So they
are those of GPTQ's loop for the weights w (I - P)^-1 and the factor (I - P) (I + A - P)^-1 in place of R / diag(R).
The figure relative_output_error is of (W' - W) X, as for every quantizer, and so larger than GPTQ's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.compress.matrix import Matrix
from hone.compress.quantizers.gptq import GPTQ
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

torch = lazy("torch")


class GPTAQ(GPTQ):
    """GPTQ towards the outputs of the model that is not compressed, inputs included. Li et al. 2025, arXiv:2504.02692."""

    paper: ClassVar[str] = "arXiv:2504.02692"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float", "hessian", "cross"})

    alpha: float = Field(
        0.25, ge=0, le=1, description="Share of the change of the inputs that is made up for: 1 in the paper; 0: GPTQ."
    )

    def _aims(self, matrix: Matrix, factor: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        cross = matrix.statistics["cross"].to(factor.dtype)[order][:, order]
        wanted, ratio = corrected(matrix.current[:, order], factor, self.alpha * cross)
        if not bool(torch.isfinite(wanted).all()):
            matrix.notes.append("the change of the inputs is too large to be made up for: as GPTQ")
            return matrix.current, factor
        aims = torch.empty_like(wanted)
        aims[:, order] = wanted
        return aims, ratio

    def work(self, rows: int, columns: int) -> Work:
        """GPTQ's, two products and two triangular solves of [K, K] (slower than products), and one of [N, K]."""
        gptq = super().work(rows, columns)
        more = 8.0 * columns**3 + rows * columns**2
        assert gptq.on_gpu is not None
        on_gpu = replace(gptq.on_gpu, flops=gptq.on_gpu.flops + more)
        held = gptq.temporaries + 6 * columns / rows
        return replace(gptq, flops=gptq.flops + more, temporaries=held, on_gpu=on_gpu)


def corrected(weights: Tensor, factor: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [N, K] and the factor [K, K] with a diagonal of ones with which GPTQ's loop does GPTAQ's updates.

    `factor` is R, `cross` [K, K] is (D - X) X^T in the units of R R^T; columns are in the order in which they are rounded.
    """
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    upper = torch.linalg.solve_triangular(factor, identity, upper=True)  # U
    shift = (cross @ upper.T).triu(1) @ upper  # P
    spread = (upper / upper.diagonal().unsqueeze(1)).triu(1)  # A
    free = identity - shift
    wanted = torch.linalg.solve_triangular(free, weights.to(factor.dtype), upper=True, left=False, unitriangular=True)
    ratio = torch.linalg.solve_triangular(free + spread, free, upper=True, left=False, unitriangular=True)
    return wanted.to(weights.dtype), ratio.to(weights.dtype)
