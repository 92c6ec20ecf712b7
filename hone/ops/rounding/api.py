"""Compensated rounding and pruning: a matrix column by column, each error made up for in later columns.

Legend: N rows, K columns; matrices are transposed, so that a column is contiguous. This is the loop of GPTQ
(arXiv:2210.17323) and SparseGPT (arXiv:2301.00774) in the form of Babai's nearest plane (arXiv:2507.18553).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.rounding import reference
from hone.ops.rounding.reference import updated
from hone.ops.rounding.selection import Pattern, largest

BLOCK = 64
"""Columns solved in one launch, and whose mask is chosen at once; a matrix product adds the errors of all earlier columns
to each block."""


class Pruning(NamedTuple):
    """Which weights become zero, as in SparseGPT: those of the smallest |value| times `weights`, where the value makes up for
    the errors of all columns before the ones that are compared.

    `weights` [K] is the factor's diagonal, so that the square of a score is what the layer's squared output error grows
    by. Without a `pattern`, a fraction `sparsity` of each row of `BLOCK` columns becomes zero; with one, the rest of
    each group of columns, which must divide `BLOCK` and K. Weights that `keep` excludes count as zeros already.
    """

    weights: Tensor
    sparsity: float = 0.5
    pattern: Pattern | None = None


def round_compensated(
    wanted: Tensor,
    steps: Tensor,
    ratio: Tensor,
    low: int,
    high: int,
    keep: Tensor | None = None,
    *,
    prune: Pruning | None = None,
    backend: str | None = None,
) -> Tensor:
    """Codes int8 [K, N] of the columns `wanted` [K, N], rounded in order on grids of `steps` [K, N] between low and high.

    `ratio` [K, K] is upper triangular: the error of column i times ratio[i, j] is added to column j before it is
    rounded. Where `keep` bool [K, N] is False the code is 0, and its error is compensated like any other. With `prune` more
    codes are 0, chosen on the way. Raises SpecError for shapes or dtypes that do not fit.
    """
    chosen = backend_of("round_compensated", wanted.device, backend, dtype=wanted.dtype)
    return _solve(chosen, wanted, ratio, steps, low, high, keep, prune)


def prune_compensated(
    wanted: Tensor,
    ratio: Tensor,
    prune: Pruning,
    keep: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Values [K, N] of the columns `wanted` [K, N]: 0 where `prune` chooses or `keep` bool [K, N] is False, else the
    column plus the compensation of earlier columns' errors (see `round_compensated`).

    Raises SpecError for shapes or dtypes that do not fit.
    """
    chosen = backend_of("prune_compensated", wanted.device, backend, dtype=wanted.dtype)
    return _solve(chosen, wanted, ratio, None, 0, 0, keep, prune)


def _solve(
    backend: str,
    wanted: Tensor,
    ratio: Tensor,
    steps: Tensor | None,
    low: int,
    high: int,
    keep: Tensor | None,
    prune: Pruning | None,
) -> Tensor:
    """Codes, or values where `steps` is None, [K, N]."""
    _check(wanted, ratio, steps, keep, prune)
    columns = len(wanted)
    wanted, ratio = wanted.contiguous(), ratio.contiguous()
    steps = None if steps is None else steps.contiguous()
    if prune is not None:  # written to as masks are chosen
        keep = torch.ones_like(wanted, dtype=torch.bool) if keep is None else keep.clone()
    pattern = None if prune is None else prune.pattern
    solved = torch.empty(wanted.shape, dtype=wanted.dtype if steps is None else torch.int8, device=wanted.device)
    errors = torch.empty_like(wanted)
    for start in range(0, columns, BLOCK):
        here = slice(start, min(start + BLOCK, columns))
        target = torch.addmm(wanted[here], ratio[:start, here].T, errors[:start])
        if prune is not None and keep is not None and pattern is None:
            gone = round(prune.sparsity * here.stop) - round(prune.sparsity * start)
            scores = (updated(target, wanted[here], ratio[here, here]) * prune.weights[here, None]).abs_()
            scores.masked_fill_(~keep[here], -1.0)
            keep[here] &= largest(scores.T.contiguous(), gone).T
        grid = None if steps is None else steps[here]
        kept = None if keep is None else keep[here].contiguous()
        weights = None if prune is None or pattern is None else prune.weights[here].contiguous()
        given = (target, wanted[here], ratio[here, here], grid, low, high, kept, pattern, weights)
        if backend == "triton":
            from hone.ops.rounding.triton_kernels import launch

            launch(*given, solved[here], errors[here])
        else:
            solved[here], errors[here] = reference.solve_columns(*given)
    return solved


def _check(wanted: Tensor, ratio: Tensor, steps: Tensor | None, keep: Tensor | None, prune: Pruning | None) -> None:
    """Raises SpecError for shapes or dtypes that do not fit."""
    given = {} if steps is None else {"steps": steps}
    given |= {"ratio": ratio} if prune is None else {"ratio": ratio, "prune.weights": prune.weights}
    columns = len(wanted)
    shapes = {"ratio": (columns, columns), "prune.weights": (columns,)}
    fits = wanted.dim() == 2 and (keep is None or keep.shape == wanted.shape)
    fits = fits and all(one.shape == shapes.get(name, wanted.shape) for name, one in given.items())
    if not fits or any(one.dtype != wanted.dtype for one in given.values()):
        said = ", ".join(f"{name} {tuple(one.shape)}" for name, one in ({"wanted": wanted} | given).items())
        raise SpecError(
            f"{said} do not fit",
            fix="give wanted, steps and keep [K, N], ratio [K, K] and prune.weights [K], all but keep of one dtype",
        )
    if (
        prune is not None
        and prune.pattern is not None
        and (columns % prune.pattern.group or BLOCK % prune.pattern.group)
    ):
        raise SpecError(
            f"groups of {prune.pattern.group} columns do not divide the {columns} columns, or the {BLOCK} of a block",
            fix=f"use groups of a power of two up to {BLOCK} that divide the columns, or no pattern",
        )
