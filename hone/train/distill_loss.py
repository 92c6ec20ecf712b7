"""The distillation loss over two heads, chunk by chunk: neither the student's nor the teacher's logits ever exist whole.

Legend: T tokens, V vocabulary, D the student's width, E the teacher's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.data.load import IGNORE
from hone.ops.reference import chunk_rows


def distill_loss(
    x_TD: Tensor,
    weight_VD: Tensor,
    taught_TE: Tensor,
    teacher_VE: Tensor,
    targets_T: Tensor,
    *,
    alpha: float,
    temperature: float,
) -> Tensor:
    """alpha t^2 KL(softmax(teacher / t) || softmax(student / t)) + (1 - alpha) cross entropy, summed over valid targets.

    `x_TD` and `taught_TE` are normed hidden states in any floating dtype, targets int64 with -100 where there is none.
    A float32 scalar in nats (float64 for float64 inputs), differentiable in `x_TD` and `weight_VD`. arXiv:1503.02531.
    """
    loss: Tensor = _DistillLoss.apply(x_TD, weight_VD, taught_TE, teacher_VE, targets_T, alpha, temperature)
    return loss


class _DistillLoss(torch.autograd.Function):
    """Gradients are made beside the loss, while a chunk's logits are at hand, so the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        taught_TE: Tensor,
        teacher_VE: Tensor,
        targets_T: Tensor,
        alpha: float,
        temperature: float,
    ) -> Tensor:
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        # Slopes of rare tokens are below float16's range; a power of two lifts them and is taken out again.
        ctx.lift = 256.0 if x_TD.dtype == torch.float16 else 1.0
        grad_x = torch.empty_like(x_TD) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=exact) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=exact, device=x_TD.device)
        rows = chunk_rows(x_TD.device.type, len(weight_VD))
        for begin in range(0, len(x_TD), rows):
            part = slice(begin, begin + rows)
            student = (x_TD[part] @ weight_VD.T).to(exact)
            teacher = (taught_TE[part] @ teacher_VE.T).to(exact)
            loss, slope = _chunk(student, teacher, targets_T[part], alpha, temperature)
            total += loss
            slope = slope.mul_(ctx.lift).to(x_TD.dtype)
            if grad_x is not None:
                torch.mm(slope, weight_VD, out=grad_x[part])
            if grad_weight is not None:
                grad_weight += slope.T @ x_TD[part]
        ctx.dtypes = x_TD.dtype, weight_VD.dtype
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = upstream / ctx.lift
        return (
            None if grad_x is None else (grad_x * scale).to(ctx.dtypes[0]),
            None if grad_weight is None else (grad_weight * scale).to(ctx.dtypes[1]),
            *[None] * 5,
        )


def _chunk(
    student: Tensor, teacher: Tensor, targets: Tensor, alpha: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Loss summed over the valid rows of logits [T, V], and its slope by the student's."""
    valid = targets != IGNORE
    chosen = targets.masked_fill(~valid, 0)[:, None]
    soft = F.log_softmax(student / temperature, dim=-1)
    taught = F.log_softmax(teacher / temperature, dim=-1)
    plain = soft if temperature == 1.0 else F.log_softmax(student, dim=-1)
    share = taught.exp()
    divergence = (share * (taught - soft)).sum(-1)
    text = -plain.gather(1, chosen)[:, 0]
    losses = alpha * temperature**2 * divergence + (1 - alpha) * text
    # d KL / d student = (softmax(student / t) - softmax(teacher / t)) / t, times t^2.
    slope = soft.exp().sub_(share).mul_(alpha * temperature)
    slope.add_(plain.exp(), alpha=1 - alpha)
    slope.scatter_add_(1, chosen, torch.full_like(chosen, alpha - 1, dtype=slope.dtype))
    slope *= valid[:, None]
    return losses.masked_fill(~valid, 0).sum(), slope
