"""Inputs of compensated rounding, and its definition as a check of given codes."""

from __future__ import annotations

import torch
from torch import Tensor


def inputs(columns: int, rows: int, device: str = "cpu") -> dict[str, Tensor]:
    """Columns of unlike scale, steps of both signs, and a factor of a correlated Hessian."""
    draw = torch.Generator().manual_seed(columns + rows)
    x = torch.randn(columns, 2 * columns, generator=draw)
    x = x.cumsum(0) * torch.rand(columns, 1, generator=draw)
    hessian = x @ x.T / (2 * columns) + 0.1 * torch.eye(columns)
    factor = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    steps = (0.05 + 0.3 * torch.rand(columns, rows, generator=draw)) * torch.randn(columns, rows, generator=draw).sign()
    wanted = torch.randn(columns, rows, generator=draw)
    ratio = factor / factor.diagonal()
    return {name: one.to(device) for name, one in {"wanted": wanted, "steps": steps, "ratio": ratio}.items()}


def assert_rounded(codes: Tensor, wanted: Tensor, steps: Tensor, ratio: Tensor, low: int, high: int, keep=None) -> None:
    """In float64, every code is the nearest one to its column's target, which earlier columns' errors have moved."""
    codes64, wanted, steps, ratio = (one.double().cpu() for one in (codes, wanted, steps, ratio))
    errors = wanted - codes64 * steps
    target = wanted + (ratio.triu(1).T @ errors)
    best = (target / steps).round().clamp(low, high)
    distance = ((target / steps).clamp(low, high) - codes64).abs()
    if keep is not None:
        keep = keep.cpu()
        assert not codes64[~keep].any()
        distance, best = distance[keep], best[keep]
        codes64 = codes64[keep]
    assert distance.max() <= 0.5 + 1e-3
    assert (best != codes64).double().mean() < 2e-3  # ties that the last bit of a sum decides
    assert codes64.abs().max() > 1
