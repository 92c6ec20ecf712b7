"""The sweep of GPTQ and SparseGPT: a matrix column by column, each rounding or pruning error made up for in later columns.

Legend: N rows, K columns, W [N, K] weights, H [K, K] mean of x x^T of their inputs, Hinv = H^-1, Q [N, K] codes, G groups of
columns, R [K, K] upper triangular with R R^T = H.

GPTQ (arXiv:2210.17323), as its paper tells it, with Hinv replaced by its Cholesky factor:

    Hinv = cholesky(inverse(H + damping * mean(diag(H)) * I), upper=True)
    for j in range(K):
        Q[:, j] = round(W[:, j] / s)
        e = (W[:, j] - s * Q[:, j]) / Hinv[j, j]
        W[:, j + 1:] -= outer(e, Hinv[j, j + 1:])

What is solved here is the same without an inverse. The layer's squared output error is ||E R||^2 for E = W - s Q, and column j
of E R is e_j R_jj + sum_{i<j} e_i R_ij: rounding w_j + sum_{i<j} e_i R_ij / R_jj makes it as small as the grid allows. This is
Babai's nearest plane (arXiv:2507.18553), and R is that upper factor's inverse. `reference` is the loop above, for tests.

SparseGPT (arXiv:2301.00774) is the same sweep with zero in place of the grid for some weights. A weight that becomes zero adds
(R_jj t_j)^2 to the squared output error, where t_j is the weight plus the compensation of the columns before. That is the
paper's score t_j^2 / [H_j^-1]_jj, whose inverse has those columns eliminated: [H_j^-1]_jj is 1 / R_jj^2. A mask is chosen for
every block of columns once the errors of the blocks before are compensated, in each row by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops import prune_compensated, round_compensated
from hone.ops.formats import code_range
from hone.ops.rounding.api import Pruning
from hone.ops.rounding.selection import Pattern


def column_order(diagonal: Tensor, act_order: bool, groups: Pattern | None = None) -> Tensor:
    """Int64 [K]: columns of large `diagonal` [K] of H first if `act_order`; the columns of a pattern's group stay neighbours."""
    size = groups.group if groups is not None else 1
    places = torch.arange(len(diagonal), device=diagonal.device).view(-1, size)
    if act_order:
        places = places[torch.argsort(diagonal.reshape(-1, size).sum(1), descending=True, stable=True)]
    return places.flatten()


def damped_factor(hessian: Tensor, damping: float, otherwise: str) -> tuple[Tensor, tuple[str, ...]]:
    """R [K, K] of H, and notes: more damping, then float64, where H is not positive definite.

    When that does not help either, R is diag(H)^(1/2), with which nothing is compensated; `otherwise` says what happens then.
    """
    for dtype in dict.fromkeys((hessian.dtype, torch.float64)):
        used = damping
        while used <= 1.0:
            factor = upper_factor(hessian.to(dtype), used)
            if factor is not None:
                return factor.to(hessian.dtype), (f"damping raised to {used:g}",) if used > damping else ()
            used *= 10
    diagonal = hessian.diagonal().clamp(min=torch.finfo(hessian.dtype).tiny)
    return diagonal.sqrt().diag(), (f"no Cholesky factor at any damping: {otherwise}",)


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
    """Q int8 [N, K] for W = `weights` on the symmetric grid of `scales` [N, G], errors propagated by `factor` (R, [K, K]).

    `order` int64 [K] is the order in which columns are rounded (R is that of the permuted H). `keep` bool [N, K] forces
    code 0 where False, and that error is propagated like any other; `prune` chooses more such weights.
    """
    columns = weights.shape[1]
    order = torch.arange(columns, device=weights.device) if order is None else order
    steps = scales.to(weights.dtype).T[order // (columns // scales.shape[1])]  # [K, N]: a column's scale of every row
    codes = round_compensated(
        weights.T[order].contiguous(),  # transposed, so that a column is contiguous
        steps,
        factor / factor.diagonal(),
        *code_range(bits),
        None if keep is None else keep.T[order],
        prune=prune,
    )
    return _in_file_order(codes, order)


def sparsify(
    weights: Tensor, factor: Tensor, prune: Pruning, *, keep: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """W [N, K] with zeros where `keep` is False or `prune` chooses, and the others updated to make up for them.

    `factor`, `keep` and `order` as for `solve`.
    """
    order = torch.arange(weights.shape[1], device=weights.device) if order is None else order
    kept = None if keep is None else keep.T[order]
    values = prune_compensated(weights.T[order].contiguous(), factor / factor.diagonal(), prune, kept)
    return _in_file_order(values, order)


def reference(W: Tensor, H: Tensor, scales: Tensor, bits: int, damping: float) -> Tensor:
    """Q int8 [N, K] by the loop of GPTQ's paper: what `solve` computes, with an inverse and column by column in Python."""
    low, high = code_range(bits)
    W, columns = W.clone(), W.shape[1]
    damped = H + damping * H.diagonal().mean() * torch.eye(columns, dtype=H.dtype, device=H.device)
    Hinv = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    Q = torch.zeros(W.shape, dtype=torch.int8, device=W.device)
    for j in range(columns):
        s = scales[:, j // (columns // scales.shape[1])].to(W.dtype)
        code = (W[:, j] / s).round().clamp(low, high)
        Q[:, j] = code.to(torch.int8)
        error = (W[:, j] - s * code) / Hinv[j, j]
        W[:, j + 1 :] -= torch.outer(error, Hinv[j, j + 1 :])
    return Q


def towards(weights: Tensor, factor: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [N, K] and the factor [K, K] with a diagonal of ones with which the sweep does GPTAQ's updates.

    GPTAQ (arXiv:2504.02692) rounds column j of w to q_j and then updates w_k -= (w_j - q_j) U_jk / U_jj - w_j P_jk for every
    later k, with U upper triangular, U^T U = H^-1, D the inputs X in the model that is not compressed and
    P = ((D - X) X^T U^T, above the diagonal) U. The rounded values t_j are linear in w and q: t (I + A - P) = w + q A with
    A = U / diag(U) above the diagonal. So they are those of GPTQ's loop for the weights w (I - P)^-1 and the factor
    (I - P) (I + A - P)^-1 in place of R / diag(R).

    `factor` is R, `cross` [K, K] is (D - X) X^T in the units of R R^T; columns are in the order in which they are rounded.
    """
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    upper = torch.linalg.solve_triangular(factor, identity, upper=True)  # U
    shift = (cross @ upper.T).triu(1) @ upper  # P
    ratios = (upper / upper.diagonal().unsqueeze(1)).triu(1)  # A
    free = identity - shift
    wanted = torch.linalg.solve_triangular(free, weights.to(factor.dtype), upper=True, left=False, unitriangular=True)
    ratio = torch.linalg.solve_triangular(free + ratios, free, upper=True, left=False, unitriangular=True)
    return wanted.to(weights.dtype), ratio.to(weights.dtype)


def _in_file_order(solved: Tensor, order: Tensor) -> Tensor:
    """[N, K] from the columns [K, N] in the order in which they were solved."""
    result = torch.empty_like(solved)
    result[order] = solved
    return result.T.contiguous()
