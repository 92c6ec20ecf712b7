"""The best product of two thin matrices: B A of rank r with the least tr(D H D^T) for D = E - B A.

Legend: E [N, K] a weight or its error, H [K, K] mean of x x^T of its inputs (None: the identity), U [N, r] orthonormal.

For any B the best A is a projection, so the answer is U U^T E with U the r leading eigenvectors of E H E^T: of all weights
this is the truncated SVD of E H^(1/2) that SVD-LLM (arXiv:2403.07378) and EoRA (arXiv:2410.21271) multiply by the inverse
root. Written so it needs no inverse, hence no damping, and H may be singular.
"""

from __future__ import annotations

import torch
from torch import Tensor

OVERSAMPLED = 16
"""Columns beyond the rank that an iteration carries."""

ITERATIONS = 8
"""Passes of the subspace iteration: on matrices of noise, whose spectrum is the flattest, what is left is within 0.5 % of the least."""

DOUBLE, THIN = 2.0, 1.5
"""Time of a product in float64, and of one with a thin factor, relative to large ones in float32 (one Xeon core)."""

EXACT = 8
"""A rank above the smaller side divided by this, oversampled, is found from all eigenvectors."""


def best(error: Tensor, hessian: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
    """(A [r, K], B [N, r]) float64 of `error` [N, K]; row i of A and column i of B have equal norms."""
    if is_exact(*error.shape, rank):
        basis = exact(error.double(), None if hessian is None else hessian.double(), rank)
    else:
        basis = iterated(error, None if hessian is None else hessian.to(error.dtype), rank).double()
    down = basis.T @ error.double()
    sizes = down.norm(dim=1).sqrt()
    sizes = torch.where(sizes > 0, sizes, torch.ones_like(sizes))
    return down / sizes[:, None], basis * sizes


def is_exact(rows: int, columns: int, rank: int) -> bool:
    """Whether all eigenvectors are computed."""
    return EXACT * (rank + OVERSAMPLED) >= min(rows, columns)


def exact(error: Tensor, hessian: Tensor | None, rank: int) -> Tensor:
    """U [N, r] from the eigenvectors of the smaller of E H E^T and R^T E^T E R, where R R^T = H."""
    rows, columns = error.shape
    if rows <= columns:
        weighted = error if hessian is None else error @ hessian
        return _leading(weighted @ error.T, rank)
    seen = error if hessian is None else error @ root(hessian)
    return torch.linalg.qr(seen @ _leading(seen.T @ seen, rank)).Q


def iterated(error: Tensor, hessian: Tensor | None, rank: int) -> Tensor:
    """U [N, r] by subspace iteration on E H E^T from a fixed start, and Rayleigh-Ritz; in the dtype of `error`.

    An error of U changes what is left by its square, so float32 is enough.
    """
    start = torch.randn(len(error), rank + OVERSAMPLED, generator=torch.Generator().manual_seed(0))
    basis = start.to(error)
    for _ in range(ITERATIONS):
        seen = error.T @ basis
        basis = torch.linalg.qr(error @ (seen if hessian is None else hessian @ seen)).Q
    seen = error.T @ basis
    return basis @ _leading(seen.T @ (seen if hessian is None else hessian @ seen), rank)


def root(hessian: Tensor) -> Tensor:
    """Lower triangular R with R R^T = H, but for the least multiple of the identity that makes it positive definite."""
    mean = hessian.diagonal().mean()
    for power in range(-12, 1):
        damped = hessian.clone()
        damped.diagonal().add_(10.0**power * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed) and bool(torch.isfinite(lower).all()):
            return lower
    return hessian.diagonal().clamp(min=0).sqrt().diag()


def flops(rows: int, columns: int, rank: int, eigh: float, *, calibrated: bool) -> float:
    """Operations of `best` at the rate of float32 products, an eigendecomposition in float64 counted as `eigh` n^3."""
    small, last = min(rows, columns), DOUBLE * 2.0 * rank * rows * columns
    if is_exact(rows, columns, rank):
        weighted = 2.0 * rows * columns**2 if calibrated else 0.0
        return DOUBLE * (weighted + 2.0 * small**2 * max(rows, columns)) + eigh * small**3 + last
    width = rank + OVERSAMPLED
    each = 4.0 * rows * columns + (2.0 * columns**2 if calibrated else 0.0) + 4.0 * rows * width
    return THIN * (ITERATIONS + 1) * each * width + last


def _leading(symmetric: Tensor, rank: int) -> Tensor:
    """The `rank` eigenvectors of the largest eigenvalues, largest first."""
    return torch.linalg.eigh((symmetric + symmetric.T) / 2).eigenvectors.flip(1)[:, :rank]
