"""Inputs of compensated rounding and pruning, and their definitions as checks of what was solved."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.rounding.api import BLOCK, Pruning
from hone.ops.rounding.selection import Pattern

PRUNINGS = [(0.5, None), (0.3, None), (0.5, Pattern(2, 4)), (0.5, Pattern(4, 8))]
"""Sparsity and pattern."""


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


def pruning(columns: int, sparsity: float, pattern: Pattern | None, device: str = "cpu") -> Pruning:
    """A pruning whose columns weigh from 0.1 to 1.1: the diagonal of a matrix, as solvers pass it, whose entries lie apart."""
    weights = 0.1 + torch.rand(columns, generator=torch.Generator().manual_seed(columns))
    return Pruning(weights.to(device).diag().diagonal(), sparsity, pattern)


def masked(errors: Tensor, wanted: Tensor, ratio: Tensor, prune: Pruning, keep: Tensor | None) -> Tensor:
    """Bool [K, N], float64: the mask that `prune` chooses when the columns before each choice have `errors`, by sorting."""
    columns, rows = wanted.shape
    found = torch.ones(columns, rows, dtype=torch.bool) if keep is None else keep.clone()
    size = BLOCK if prune.pattern is None else prune.pattern.group
    for begin in range(0, columns, size):
        end = min(begin + size, columns)
        moved = torch.linalg.inv(ratio[begin:end, begin:end]).T @ ratio[:begin, begin:end].T @ errors[:begin]
        aim = wanted[begin:end] + moved
        scores = (aim * prune.weights[begin:end, None].double().cpu()).abs()
        scores[~found[begin:end]] = -1.0
        if prune.pattern is None:
            count = round(prune.sparsity * end) - round(prune.sparsity * begin)
        else:
            count = size - prune.pattern.stay
        found[begin:end].scatter_(0, scores.sort(dim=0, stable=True).indices[:count], False)
    return found


def assert_rounded(
    codes: Tensor, wanted: Tensor, steps: Tensor, ratio: Tensor, low: int, high: int, keep=None, prune=None
) -> None:
    """In float64, every code is the nearest one to its column's target, which earlier columns' errors have moved."""
    codes64, wanted, steps, ratio = (one.double().cpu() for one in (codes, wanted, steps, ratio))
    errors = wanted - codes64 * steps
    target = wanted + (ratio.triu(1).T @ errors)
    best = (target / steps).round().clamp(low, high)
    distance = ((target / steps).clamp(low, high) - codes64).abs()
    keep = None if keep is None else keep.cpu()
    if keep is not None:
        assert not codes64[~keep].any()
    if prune is not None:
        keep = masked(errors, wanted, ratio, prune, keep)
        assert (codes64[~keep] != 0).double().mean() < 2e-3  # scores that differ in the last bit
    if keep is not None:
        distance, best, codes64 = distance[keep], best[keep], codes64[keep]
    assert (distance > 0.5 + 1e-3).double().mean() <= (0 if prune is None else 2e-3)
    assert (best != codes64).double().mean() < 2e-3  # ties that the last bit of a sum decides
    assert codes64.abs().max() > 1


def assert_pruned(values: Tensor, wanted: Tensor, ratio: Tensor, prune: Pruning, keep=None) -> None:
    """In float64, the weights of the smallest scores are zero, and every other one is its column's target."""
    values64, wanted, ratio = (one.double().cpu() for one in (values, wanted, ratio))
    errors = wanted - values64
    target = wanted + (ratio.triu(1).T @ errors)
    keep = None if keep is None else keep.cpu()
    if keep is not None:
        assert not values64[~keep].any()
    zero = values64 == 0
    assert ((~masked(errors, wanted, ratio, prune, keep)) != zero).double().mean() < 2e-3
    assert (values64 - target)[~zero].abs().max() <= 1e-4 * target.abs().max()
    if prune.pattern is not None and keep is None:
        assert (
            zero.view(-1, prune.pattern.group, zero.shape[1]).sum(1) == prune.pattern.group - prune.pattern.stay
        ).all()
    elif keep is None:
        assert (zero.sum(0) == round(prune.sparsity * len(zero))).all()
