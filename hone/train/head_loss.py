"""Losses over the logits that never hold all logits: chunk by chunk, the gradient made beside the loss.

Legend: T tokens, V vocabulary, D width of the hidden states, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""From float32 logits [C, V] of the tokens in a slice: (loss summed over them, its slope by the logits [C, V])."""


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits are made at once: 16 MiB of float32, so that small vocabularies stay near the cache."""
    return max(64, (1 << 22) // vocab_size)


def cross_entropy(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Cross entropy of x W^T with the targets, summed over those that are not -100; float32 scalar."""

    def chunk(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        targets = targets_T[rows]
        valid = targets != IGNORE
        chosen = targets.clamp_min(0)[:, None]
        logs = F.log_softmax(logits, dim=-1)
        loss = -(logs.gather(1, chosen)[:, 0] * valid).sum()
        slope = logs.exp_()
        slope.scatter_add_(1, chosen, slope.new_full((1, 1), -1.0).expand_as(chosen))
        return loss, slope.mul_(valid[:, None])

    loss: Tensor = _HeadLoss.apply(x_TD, weight_VD, chunk)
    return loss


def distillation(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    teacher_logits: Callable[[slice], Tensor],
    *,
    alpha: float,
    temperature: float,
) -> Tensor:
    """alpha t^2 KL(softmax(teacher / t) || softmax(student / t)) + (1 - alpha) cross entropy, summed over valid targets.

    `teacher_logits` gives the teacher's logits [C, V] of the tokens in a slice. Float32 scalar. arXiv:1503.02531.
    """

    def chunk(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        targets = targets_T[rows]
        valid = targets != IGNORE
        chosen = targets.clamp_min(0)[:, None]
        soft = F.log_softmax(logits / temperature, dim=-1)
        taught = F.log_softmax(teacher_logits(rows).float() / temperature, dim=-1)
        plain = soft if temperature == 1.0 else F.log_softmax(logits, dim=-1)
        share = taught.exp()
        divergence = (share * (taught - soft)).sum(-1)
        text = -plain.gather(1, chosen)[:, 0]
        loss = ((alpha * temperature**2 * divergence + (1 - alpha) * text) * valid).sum()
        # d KL / d student = (softmax(student / t) - softmax(teacher / t)) / t, and the factor t^2.
        slope = soft.exp().sub_(share).mul_(alpha * temperature)
        slope.add_(plain.exp(), alpha=1 - alpha)
        slope.scatter_add_(1, chosen, slope.new_full((1, 1), alpha - 1).expand_as(chosen))
        return loss, slope.mul_(valid[:, None])

    loss: Tensor = _HeadLoss.apply(x_TD, weight_VD, chunk)
    return loss


class _HeadLoss(torch.autograd.Function):
    """Sum of a chunk loss over all tokens. The products for the gradients are done at once, so none is done twice."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, chunk_loss: ChunkLoss) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_TD) if wants_x else None
        # Summed over chunks in float32 whatever the weights are.
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        loss = torch.zeros((), device=x_TD.device)
        step = chunk_tokens(len(weight_VD))
        for start in range(0, len(x_TD), step):
            rows = slice(start, min(start + step, len(x_TD)))
            x = x_TD[rows]
            added, slope = chunk_loss((x @ weight_VD.T).float(), rows)
            loss += added
            slope = slope.to(x.dtype)
            if grad_x is not None:
                torch.mm(slope, weight_VD, out=grad_x[rows])
            if grad_weight is not None:
                _add_product(grad_weight, slope, x)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = x_TD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return (
            None if grad_x is None else grad_x * upstream.to(ctx.dtype),
            None if grad_weight is None else (grad_weight * upstream).to(ctx.dtype),
            None,
        )


def _add_product(total: Tensor, slope_CV: Tensor, x_CD: Tensor) -> None:
    """total [V, D] += slope^T x, in place where the formats agree."""
    if total.dtype == x_CD.dtype:
        total.addmm_(slope_CV.T, x_CD)
    else:
        total.add_(slope_CV.T @ x_CD)
