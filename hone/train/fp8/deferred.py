"""A linear in fp8 whose weight's gradient is computed later than its input's: the W passes of zero-bubble schedules.

The pass that computes the input's gradient casts the output's in both directions, from one read. What stays for the later pass are
the codes that its product reads, a byte a number where bf16 keeps two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.model.linear import Dense
from hone.ops.fp8.api import backward_in_parts, check_sizes, linear_forward, saved
from hone.parallel.pipeline.weight_gradients import WeightGradients


class DeferredForward:
    """The forward of an `Fp8Dense` that may leave its weight's gradient to `queue`; the bias's is computed at once."""

    def __init__(self, linear: Any, queue: WeightGradients) -> None:
        self.linear, self.queue = linear, queue

    def __call__(self, x: Tensor) -> Tensor:
        one = self.linear
        if not torch.is_grad_enabled():
            return Dense.forward(one, x)
        check_sizes(x, one.weight, one.recipe)
        held = one.held or (None, None, None, None)
        y: Tensor = _Linear.apply(x, one.weight, one.bias, self.queue, *held, one.recipe)
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradients, *codes_and_recipe: Any
    ) -> Tensor:
        inputs = (x, weight, bias, *codes_and_recipe)
        found = linear_forward(*inputs)
        ctx.save_for_backward(*saved(inputs, found))
        ctx.weight, ctx.biased, ctx.queue, ctx.recipe = weight, bias is not None, queue, codes_and_recipe[-1]
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_x, compute = backward_in_parts(upstream, *ctx.saved_tensors, wants_x, wants_weight, ctx.recipe)
        of_bias = upstream.reshape(-1, upstream.shape[-1]).sum(0) if ctx.biased and wants_bias else None
        weight, of_weight = ctx.weight, None
        if wants_weight and not ctx.queue.leave(lambda: [(weight, compute())]):
            of_weight = compute()
        return of_x if wants_x else None, of_weight, of_bias, *[None] * 6
