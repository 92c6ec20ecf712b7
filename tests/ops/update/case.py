"""Inputs of an AdamW step, and its formula in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.update.api import AdamWNumbers

NUMBERS = AdamWNumbers(count=7, lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def inputs(size: int, grad_dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """A weight, its gradient and moments as after some steps."""
    draw = torch.Generator().manual_seed(size)
    weight, grad, mean, square = torch.randn(4, size, generator=draw)
    made = {"weight": weight, "grad": grad.to(grad_dtype), "exp_avg": 0.1 * mean, "exp_avg_sq": square.square()}
    return {name: one.to(device) for name, one in made.items()}


def exact(given: dict[str, Tensor], numbers: AdamWNumbers, factor: float) -> dict[str, Tensor]:
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, in float64."""
    weight, grad, mean, square = (given[name].double().cpu() for name in ("weight", "grad", "exp_avg", "exp_avg_sq"))
    grad = grad * factor
    mean = numbers.beta1 * mean + (1 - numbers.beta1) * grad
    square = numbers.beta2 * square + (1 - numbers.beta2) * grad**2
    unbiased = mean / (1 - numbers.beta1**numbers.count), square / (1 - numbers.beta2**numbers.count)
    step = unbiased[0] / (unbiased[1].sqrt() + numbers.eps) + numbers.weight_decay * weight
    return {"weight": weight - numbers.lr * step, "exp_avg": mean, "exp_avg_sq": square}


def assert_steps(size: int, grad_dtype: torch.dtype, rounded_dtype: torch.dtype, device: str, backend: str) -> None:
    """The step agrees with the formula, scaled or not; the gradient stays; what is rounded is the weight, to the bit."""
    from hone.ops import adamw_step

    for factor in (1.0, 0.25):
        given = inputs(size, grad_dtype, device)
        wanted, before = exact(given, NUMBERS, factor), given["grad"].clone()
        scale = None if factor == 1.0 else torch.tensor(factor, device=device)
        rounded = torch.zeros(size, dtype=rounded_dtype, device=device)
        adamw_step(**given, numbers=NUMBERS, factor=scale, rounded=rounded, backend=backend)
        for name, one in wanted.items():
            torch.testing.assert_close(given[name].double().cpu(), one, rtol=2e-6, atol=1e-6, msg=name)
        assert torch.equal(given["grad"], before)
        assert torch.equal(rounded, given["weight"].to(rounded_dtype))
