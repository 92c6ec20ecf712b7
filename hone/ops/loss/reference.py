"""Cross entropy of a linear head in plain torch, one chunk of tokens at a time: the kernel's reference, and the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.cost.chunks import default_chunk_tokens
from hone.ops.loss.divergence import FORWARD_KL, Divergence, apart


@dataclass(frozen=True)
class Teacher:
    """A teacher's output for the same tokens: its last hidden states after the norm [..., E] and its head's weight [V, E].

    The loss becomes alpha t^2 D(softmax(teacher / t), softmax(student / t)) + (1 - alpha) of the loss without it, where D is a
    divergence, KL(teacher || student) by default. Hinton et al. 2015, arXiv:1503.02531.
    """

    hidden: Tensor
    weight: Tensor
    alpha: float
    temperature: float = 1.0
    softcap: float | None = None
    """Cap of the teacher's logits: softcap * tanh(logit / softcap)."""
    divergence: Divergence = FORWARD_KL
    shared_vocab: int | None = None
    """Ids, from 0, that both vocabularies have, where one is padded further: D is that of the distributions over these alone.
    None: the vocabularies are of one size."""

    @property
    def plain(self) -> bool:
        """Whether it is the divergence over whole vocabularies that kernels compute."""
        return self.divergence.kind == "forward_kl" and self.shared_vocab is None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: Literal["sum", "mean"] = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    teacher: Teacher | None = None,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """`hone.ops.linear_cross_entropy` in plain torch: chunks of logits, gradients computed with the loss."""
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if not torch.is_grad_enabled():  # a Function looks at its inputs only, and would compute unused gradients
        x, weight = x.detach(), weight.detach()
    chunk_tokens = chunk_tokens or default_chunk_tokens(x.device.type, len(weight))
    total: Tensor = _LinearCrossEntropy.apply(
        x, weight, targets, ignore_index, z_loss, label_smoothing, teacher, chunk_tokens, softcap
    )
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the loss, while a chunk's logits exist, so the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        z_loss: float,
        label_smoothing: float,
        teacher: Teacher | None,
        chunk_tokens: int,
        softcap: float | None,
    ) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        # Gradients of rare tokens are below float16's range: scaled by a power of two, divided out later.
        ctx.lift = 256.0 if x.dtype == torch.float16 else 1.0
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        wants_grad = grad_x is not None or grad_weight is not None
        total = torch.zeros((), dtype=exact, device=x.device)
        teacher_hidden = None if teacher is None else teacher.hidden.reshape(len(x), -1)
        for begin in range(0, len(x), chunk_tokens):
            part = x[begin : begin + chunk_tokens]
            chosen = targets[begin : begin + chunk_tokens]
            logits = _capped((part @ weight.T).to(exact), softcap)
            slope = None if softcap is None or not wants_grad else 1 - (logits / softcap).square()
            if teacher is None or teacher_hidden is None:
                loss, grad = _cross_entropy_chunk(logits, chosen, ignore_index, z_loss, label_smoothing, wants_grad)
            else:
                theirs = (teacher_hidden[begin : begin + chunk_tokens] @ teacher.weight.T).to(exact)
                theirs = _capped(theirs, teacher.softcap)
                loss, grad = _teacher_chunk(logits, theirs, chosen, ignore_index, z_loss, teacher, wants_grad)
            total = total + loss  # not in place: torch.compile of 2.11 would treat the sum as one without gradients
            if grad is None:
                continue
            if slope is not None:
                grad *= slope
            grad = grad.mul_(ctx.lift).to(x.dtype)
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[begin : begin + chunk_tokens])
            if grad_weight is not None:
                if exact == x.dtype and teacher is None:  # with a teacher earlier runs stay bit-equal
                    grad_weight.addmm_(grad.T, part)
                else:
                    grad_weight += grad.T @ part
        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = upstream / ctx.lift
        if grad_x is not None:
            grad_x = (grad_x * scale).to(ctx.dtypes[0])
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.dtypes[1])
        return grad_x, grad_weight, *[None] * 7


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _cross_entropy_chunk(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, label_smoothing: float, wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss summed over the valid rows of logits [T, V] and, if wanted, its grad by the logits (made in their place)."""
    valid = targets != ignore_index
    chosen = targets.masked_fill(~valid, 0)[:, None]
    log_sum = logits.logsumexp(-1)
    losses = log_sum - logits.gather(1, chosen)[:, 0]
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - logits.mean(-1))
    if z_loss:
        losses = losses + z_loss * log_sum.square()
    total = losses.masked_fill(~valid, 0).sum()
    if not wants_grad:
        return total, None
    grad = logits.sub_(log_sum[:, None]).exp_()
    if z_loss:
        grad *= (1 + 2 * z_loss * log_sum)[:, None]
    if label_smoothing:
        grad -= label_smoothing / logits.shape[-1]
    grad.scatter_add_(1, chosen, torch.full_like(chosen, label_smoothing - 1, dtype=grad.dtype))
    grad *= valid[:, None]
    return total, grad


def _teacher_chunk(
    student: Tensor,
    theirs: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    teacher: Teacher,
    wants_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """`_cross_entropy_chunk` with a teacher's logits `theirs` [T, V]: the mix that `Teacher` describes, and its grad."""
    alpha, temperature, shared = teacher.alpha, teacher.temperature, teacher.shared_vocab
    valid = targets != ignore_index
    chosen = targets.masked_fill(~valid, 0)[:, None]
    soft = F.log_softmax(student[:, :shared] / temperature, dim=-1)
    wanted = F.log_softmax(theirs[:, :shared] / temperature, dim=-1)
    plain = soft if temperature == 1.0 and shared is None else F.log_softmax(student, dim=-1)
    divergence, grad = apart(teacher.divergence, wanted, soft, wants_grad=wants_grad)
    text = -plain.gather(1, chosen)[:, 0]
    log_sum = student.logsumexp(-1) if z_loss else None
    if log_sum is not None:
        text = text + z_loss * log_sum.square()
    losses = alpha * temperature**2 * divergence + (1 - alpha) * text
    total = losses.masked_fill(~valid, 0).sum()
    if grad is None:
        return total, None
    # The gradient by the student's logits is that by logits / t, divided by t, times t^2.
    grad = grad.mul_(alpha * temperature)
    if grad.shape[1] < student.shape[1]:
        grad = F.pad(grad, (0, student.shape[1] - grad.shape[1]))
    if log_sum is None:
        grad.add_(plain.exp(), alpha=1 - alpha)
    else:
        grad.addcmul_(plain.exp(), (1 + 2 * z_loss * log_sum)[:, None], value=1 - alpha)
    grad.scatter_add_(1, chosen, torch.full_like(chosen, alpha - 1, dtype=grad.dtype))
    grad *= valid[:, None]
    return total, grad
