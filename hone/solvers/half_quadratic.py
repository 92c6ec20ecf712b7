"""Half-quadratic splitting: the grid of a group's weights without its outliers. Badri and Shaji 2023 (HQQ).

Legend: N rows, K columns, n rows of a chunk, G groups per row, g columns per group.

The error w - w' is split into outliers o and a rest. In turn o is the proximal point of |o|^p at the error, with a few
large values for p < 1, and the grid is the one that fits w - o best with the codes that w has. Errors are measured in
steps of the grid, so that beta means the same for weights of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.formats import code_range
from hone.ops.rounding.integer_grid import Grid, chunk_rows, join, stored


def fit_grid(weights: Tensor, start: Grid, bits: int, *, iters: int, norm: float, beta: float, kappa: float) -> Grid:
    """The grids of weights [N, K] after `iters` turns from `start`, with p = `norm` and the penalty `beta`, which grows by `kappa` a turn."""
    num_groups, rows = start.scales.shape[1], chunk_rows(weights)
    found = []
    for begin in range(0, len(weights), rows):
        part = slice(begin, begin + rows)
        groups = weights[part].reshape(-1, num_groups, weights.shape[1] // num_groups)
        found.append(fit(groups, start.rows(part), bits, iters=iters, norm=norm, beta=beta, kappa=kappa))
    return join(found)


def fit(groups: Tensor, start: Grid, bits: int, *, iters: int, norm: float, beta: float, kappa: float) -> Grid:
    """The grids [n, G] of weights [n, G, g] with the least sum of |error|^p of all turns, `start` included."""
    low, high = code_range(bits)
    now = start
    best, least = start, None
    for turn in range(iters + 1):
        steps, zeros = now.wide(groups.dtype)
        codes = (groups / steps + zeros).round_().clamp_(low, high)
        error = groups - (codes - zeros) * steps
        size = error.abs().pow_(norm).sum(-1)
        if least is None:
            least = size
        else:
            better = size < least
            best, least = now.where(better, best), torch.where(better, size, least)
        if turn == iters:
            break
        aim = groups - shrink(error / steps, beta, norm) * steps
        now = _refit(aim, codes, now, low, high)
        beta *= kappa
    return best


def shrink(error: Tensor, beta: float, norm: float) -> Tensor:
    """The proximal point of |x|^p / beta at `error`, in its generalized form: sign(e) max(|e| - |e|^(p-1) / beta, 0)."""
    size = error.abs()
    less = size.pow(norm - 1).div_(beta)  # infinite at 0, which stays 0
    return (size - less).clamp_(min=0).mul_(error.sign())


def _refit(aim: Tensor, codes: Tensor, now: Grid, low: int, high: int) -> Grid:
    """The grids that fit `aim` [n, G, g] best with `codes`: the zero points for the scales, then the scales."""
    steps, zeros = now.wide(aim.dtype)
    points = None
    if now.zero_points is not None:
        zeros = (codes - aim / steps).mean(-1, keepdim=True).round_().clamp_(low, high)
        points = zeros.squeeze(-1).to(torch.int8)
    values = codes - zeros
    norm = values.square().sum(-1)
    scales = torch.where(norm > 0, (values * aim).sum(-1) / norm, steps.squeeze(-1))
    return Grid(stored(scales, now.scales.dtype), points)
