"""AdamW's step in plain torch: what the kernel computes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AdamWNumbers(NamedTuple):
    """The numbers of step `count` (from 1) of AdamW, arXiv:1711.05101; `weight_decay` is decoupled."""

    count: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw_step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: AdamWNumbers,
    factor: Tensor | None,
    rounded: Tensor | None,
) -> None:
    """See hone.ops.update.api.adamw_step."""
    count, lr, beta1, beta2, eps, weight_decay = numbers
    grad = grad.float() if factor is None else grad.float() * factor
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_((1 - beta2**count) ** 0.5).add_(eps)
    weight.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, root, value=-lr / (1 - beta1**count))
    if rounded is not None:
        rounded.copy_(weight)
