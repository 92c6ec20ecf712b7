"""Pairs of collectives of tensor parallelism, each the gradient of the other: Megatron's f and g, and those of its sequence parallelism.

Shoeybi et al. 2019, arXiv:1909.08053 (f, g); Korthikanti et al. 2022, arXiv:2205.05198 (sequence parallelism).
They are kept out of torch.compile, which compiles what is between them. With sequence parallelism a rank's tokens are the next B S / n of
all sequences, one sequence after the other: a gathered tensor needs no copy then. Norms and residuals, which compute with them, know no positions.
Legend: B sequences, S tokens, D width, n ranks of the axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.parallel.axis import Axis


@torch.compiler.disable
def copied(x: Tensor, axis: Axis) -> Tensor:
    """f: x, which all ranks have; its gradient is the sum of every rank's."""
    return x if axis.size == 1 else _Copied.apply(x, axis)  # type: ignore[no-any-return]


@torch.compiler.disable
def summed(x: Tensor, axis: Axis) -> Tensor:
    """g: the sum of every rank's x; its gradient is each rank's."""
    return x if axis.size == 1 else _Summed.apply(x, axis)  # type: ignore[no-any-return]


@torch.compiler.disable
def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's tokens x [B, S / n, D]: all, [B, S, D]. Its gradient is summed, and each rank gets its tokens' part."""
    return x if axis.size == 1 else _Gathered.apply(x, axis)  # type: ignore[no-any-return]


@torch.compiler.disable
def scattered(x: Tensor, axis: Axis) -> Tensor:
    """This rank's tokens [B, S / n, D] of the sum of every rank's x [B, S, D]. Its gradient is gathered."""
    return x if axis.size == 1 else _Scattered.apply(x, axis)  # type: ignore[no-any-return]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.axis), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter(gradient, ctx.axis), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.axis), None


def _sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _done(axis.all_reduce(total))
    return total


def _gather(x: Tensor, axis: Axis) -> Tensor:
    whole = x.new_empty(x.shape[0], axis.size * x.shape[1], *x.shape[2:])
    _done(axis.all_gather(whole.view(-1), x.contiguous().view(-1)))
    return whole


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    # On a CPU the sum overwrites what it is given.
    parts = x.contiguous() if x.is_cuda else x.clone(memory_format=torch.contiguous_format)
    own = x.new_empty(x.shape[0], x.shape[1] // axis.size, *x.shape[2:])
    _done(axis.reduce_scatter(own.view(-1), parts.view(-1)))
    return own


def _done(transfer: Any) -> None:
    if transfer is not None:
        transfer.wait()
