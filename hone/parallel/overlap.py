"""Products whose tokens ranks share, a rank's tokens at a time: while one part is multiplied, another one travels around the ring.

The sequence-parallel regions of `hone.parallel.regions` with the product beside them: Wang et al. 2023 (ASPLOS, "Overlap
Communication with Dependent Computation via Decomposition"); torch calls it async tensor parallelism. Messages go by the group's
own stream on a GPU, so what the rank computes meanwhile hides them.
Legend: B sequences, S tokens, D and N features, n ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.parallel.axis import Axis


@torch.compiler.disable
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """`regions.gathered(x) @ weight.T + bias`: every rank's tokens x [B, S / n, D] times weight [N, D]: [B, S, N]."""
    return _GatheredLinear.apply(x, weight, bias, axis)  # type: ignore[no-any-return]


@torch.compiler.disable
def scattered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """`regions.scattered(x @ weight.T + bias)`: this rank's tokens [B, S / n, N] of the sum of every rank's product of x [B, S, D]."""
    return _ScatteredLinear.apply(x, weight, bias, axis)  # type: ignore[no-any-return]


def arriving(part: Tensor, axis: Axis, every: Tensor) -> Iterator[int]:
    """Fills `every` [n, *part.shape] with every rank's `part`: yields each rank when it is there, this one first; the next one travels while the caller works."""
    every[axis.index] = part
    for step in range(axis.size):
        rank, before = (axis.index - step) % axis.size, (axis.index - step - 1) % axis.size
        transfer = None
        if step < axis.size - 1:
            transfer = axis.rotate(every[before].view(-1), every[rank].view(-1))
        yield rank
        if transfer is not None:
            transfer.wait()


def summed_on_the_way(make: Callable[[int], Tensor], axis: Axis) -> Tensor:
    """The sum of every rank's `make(this rank)`: each part goes around once and ends where it belongs; the next is made while it travels."""
    transfer: Any = None
    part = arrived = None
    for step in range(axis.size):
        made = make((axis.index - 1 - step) % axis.size).contiguous()
        if transfer is not None:
            transfer.wait()
        part = made if arrived is None else made + arrived  # not in place: recomputation may keep what was made
        if step < axis.size - 1:
            arrived = torch.empty_like(part)
            transfer = axis.rotate(arrived.view(-1), part.view(-1))
    assert part is not None, "an axis has a rank"
    return part


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor) -> None:
    """x [B, S, D] @ weight [N, D].T + bias, written `into` [B, S, N] without a copy."""
    x, into = x.flatten(0, 1), into.view(-1, into.shape[-1])
    torch.mm(x, weight.T, out=into) if bias is None else torch.addmm(bias, x, weight.T, out=into)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        y, whole = x.new_empty(axis.size, *x.shape[:2], len(weight)), x.new_empty(axis.size, *x.shape)
        for rank in arriving(x, axis, whole):
            _product(whole[rank], weight, bias, y[rank])
        ctx.axis, ctx.biased = axis, bias is not None
        ctx.save_for_backward(whole if weight.requires_grad else None, weight)
        return y.view(x.shape[0], -1, len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        whole, weight = ctx.saved_tensors
        parts, own = _parts(gradient, ctx.axis), None
        if ctx.needs_input_grad[0]:
            own = summed_on_the_way(lambda rank: parts[rank] @ weight, ctx.axis)
        return own, *_of_weight(ctx, gradient, whole), None


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.axis, ctx.biased = axis, bias is not None
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        parts = _parts(x, axis)
        return summed_on_the_way(lambda rank: F.linear(parts[rank], weight, bias), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = gradient.new_empty(ctx.axis.size, *gradient.shape[:2], weight.shape[1])
        whole = gradient.new_empty(ctx.axis.size, *gradient.shape)
        for rank in arriving(gradient, ctx.axis, whole):
            _product(whole[rank], weight.T, None, of_x[rank])
        return of_x.view(gradient.shape[0], -1, weight.shape[1]), *_of_weight(ctx, whole, x), None


def _parts(x: Tensor, axis: Axis) -> Tensor:
    """x [B, S, D] by the rank whose tokens they are: [n, B, S / n, D]."""
    return x.reshape(axis.size, x.shape[0], -1, x.shape[2])


def _of_weight(ctx: Any, gradient: Tensor, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, of the output's `gradient` and the input of all tokens."""
    flat = gradient.flatten(0, -2)
    of_weight = flat.T @ x.flatten(0, -2) if x is not None and ctx.needs_input_grad[1] else None
    return of_weight, flat.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
