"""Cross entropy of a linear head, chunk by chunk: only one chunk's logits exist, gradients are computed with the loss.

Every chunk of tokens costs three library products and one kernel, which overwrites the logits with their gradient.
Legend: T tokens, D width, E the teacher's width, V vocabulary, R tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hone.base.errors import SpecError
from hone.cost.chunks import kernel_chunk_tokens
from hone.ops.dispatch import backend_of
from hone.ops.loss import reference
from hone.ops.loss.reference import Teacher


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
    backend: str | None = None,
) -> Tensor:
    """Cross entropy of softmax(x W^T) against `targets`, in nats, without storing all logits; a scalar.

    x [..., D] in any floating dtype, weight [V, D], targets int64 [...] with `ignore_index` where there is none.
    `z_loss` adds z_loss * log(sum(exp(logits)))^2 per token (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
    `label_smoothing` e mixes the target with the uniform distribution, as torch's cross_entropy does.
    `teacher` mixes in the divergence from a teacher (see `Teacher`). `softcap` c replaces a logit l by c tanh(l / c),
    arXiv:2408.00118. 'mean' divides by the number of valid targets (NaN without any). `chunk_tokens` is the number of tokens whose logits exist at once (None: by the device). The loss is
    float32 (float64 for float64 inputs), differentiable once in x and weight; on a GPU one backward pass only, because
    it returns the gradients without a copy. A target must lie in [0, V) or be `ignore_index`: a GPU does not check.
    Raises SpecError for shapes and options that do not fit.
    """
    if x.shape[:-1] != targets.shape or x.shape[-1] != weight.shape[-1] or targets.is_floating_point():
        raise SpecError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {targets.dtype} {tuple(targets.shape)} do not fit",
            fix="give x [..., D], weight [V, D] and targets int64 [...]",
        )
    if reduction not in ("sum", "mean"):
        raise SpecError(
            f"reduction is {reduction!r}; it may be 'sum' or 'mean': losses per token are not kept",
            fix="give 'sum' or 'mean'; for a loss per token compute the logits and use torch's cross_entropy",
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise SpecError(
            f"chunk_tokens is {chunk_tokens}; it must be at least 1",
            fix="leave chunk_tokens out for the device's default, or give 1 or more",
        )
    if teacher is not None:
        _check_teacher(teacher, targets.numel(), len(weight), label_smoothing)
    capped = softcap is not None or (teacher is not None and teacher.softcap is not None)
    divergence = teacher is not None and not teacher.plain
    chosen = backend_of("linear_cross_entropy", x.device, backend, dtype=x.dtype, softcap=capped, divergence=divergence)
    if (capped or divergence) and chosen == "triton":
        lacks = "softcap on the logits" if capped else "divergence but KL(teacher || student) over one vocabulary"
        raise SpecError(f"the kernel of linear_cross_entropy has no {lacks}", fix="leave backend out")
    if chosen != "triton":
        return reference.linear_cross_entropy(
            x, weight, targets, reduction=reduction, ignore_index=ignore_index, z_loss=z_loss,
            label_smoothing=label_smoothing, teacher=teacher, softcap=softcap, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1).contiguous()
    mean = reduction == "mean" and x.dtype != torch.float16
    count = (targets != ignore_index).sum()
    factor = (1 / count if mean else torch.ones((), device=x.device)).float()
    grads = torch.is_grad_enabled()
    alpha, temperature = (0.0, 1.0) if teacher is None else (teacher.alpha, teacher.temperature)
    teacher_hidden = None if teacher is None else teacher.hidden.detach().reshape(len(x), -1)
    teacher_weight = None if teacher is None else teacher.weight.detach()
    terms = [z_loss, label_smoothing, alpha, temperature]
    chunk_tokens = chunk_tokens or kernel_chunk_tokens(len(x))
    if torch.compiler.is_compiling():
        wants = grads and x.requires_grad, grads and weight.requires_grad
        total, _, _ = _loss_op(
            x, weight, targets, factor, teacher_hidden, teacher_weight, terms, ignore_index, chunk_tokens, *wants
        )
    elif grads and (x.requires_grad or weight.requires_grad):
        total = _Loss.apply(
            x, weight, targets, factor, teacher_hidden, teacher_weight, terms, ignore_index, chunk_tokens
        )
    else:
        total, _, _ = _loss(
            x, weight, targets, factor, teacher_hidden, teacher_weight, terms, ignore_index, chunk_tokens, False, False
        )
    return total / count if reduction == "mean" and not mean else total


def _check_teacher(teacher: Teacher, num_tokens: int, vocab_size: int, label_smoothing: float) -> None:
    if label_smoothing:
        raise SpecError(
            f"label_smoothing and a teacher are two soft targets: {label_smoothing=} was given with a teacher",
            fix="give one of them: label_smoothing=0.0 or teacher=None",
        )
    hidden, weight = tuple(teacher.hidden.shape), tuple(teacher.weight.shape)
    if len(weight) != 2 or hidden[-1] != weight[1] or teacher.hidden.numel() != num_tokens * weight[1]:
        raise SpecError(
            f"the teacher's hidden {hidden} and weight {weight} are not [..., E] of {num_tokens} tokens and [V, E]",
            fix="give the teacher's last hidden states of the same tokens, and its head's weight",
        )
    shared = teacher.shared_vocab
    if weight[0] != vocab_size and shared is None:
        raise SpecError(
            f"the teacher's weight {weight} does not have the {vocab_size} tokens of the student's",
            fix=f"use a teacher with the student's tokenizer, and give shared_vocab={min(weight[0], vocab_size)} if one is padded",
        )
    if shared is not None and not 0 < shared <= min(weight[0], vocab_size):
        raise SpecError(
            f"shared_vocab is {shared}; the student has {vocab_size} tokens, the teacher {weight[0]}",
            fix=f"give a number from 1 to {min(weight[0], vocab_size)}",
        )
    if not teacher.temperature > 0:
        raise SpecError(
            f"the teacher's temperature is positive, not {teacher.temperature}",
            fix="give a temperature above 0; 1 leaves the teacher's probabilities unchanged",
        )


class _Loss(torch.autograd.Function):
    """Returns the gradients computed with the loss without a copy, so only one backward pass is possible."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        total, *grads = _loss(*given, *ctx.needs_input_grad[:2])
        ctx.lift = _lift(given[0].dtype)
        ctx.grads = [grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise SpecError(
                "the first backward pass released the loss's gradients: there is no second one",
                fix="compute the loss again before each backward pass, or sum the losses before one backward pass",
            )
        # Without another reference to them autograd stores them as the parameters' .grad without a copy.
        (grad_x, grad_weight), ctx.grads = ctx.grads, None
        scale = (upstream / ctx.lift).reshape(1).float()
        for grad in (grad_x, grad_weight):
            if grad is not None and grad.numel():
                scale_(grad, scale)
        return grad_x, grad_weight, *[None] * 7


def scale_(values: Tensor, factor: Tensor) -> None:
    """values *= factor [1]; no memory traffic where the factor is 1, and no wait of the host."""
    from hone.ops.loss.triton_kernels import scale_in_place

    scale_in_place[(-(-values.numel() // 4096),)](values, factor, values.numel(), BLOCK=4096, num_warps=8)


MOST_ROUNDINGS = 8
"""Most chunks whose products are added up in the weight's dtype: each adds one rounding, the product itself is
float32 inside. Beyond that the sum is float32, for a 16-bit weight twice its size."""


def summed_wide(num_tokens: int, chunk_tokens: int) -> bool:
    """Whether the products of so many chunks are added up in float32."""
    return num_tokens > MOST_ROUNDINGS * chunk_tokens


def _loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    factor: Tensor,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    terms: list[float],
    ignore_index: int,
    chunk_tokens: int,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient by x or empty, gradient by weight or empty), summed over the rows of x [T, D], times `factor`.

    teacher_hidden [T, E] and teacher_weight [V, E] are the teacher's; `terms` are z_loss, label_smoothing, alpha and
    temperature. Gradients are `_lift` times too large.
    """
    num_tokens, vocab_size = len(x), len(weight)
    chunk_tokens = max(1, min(chunk_tokens, num_tokens))
    _, grad_x, grad_weight = _loss_fake(
        x,
        weight,
        targets,
        factor,
        teacher_hidden,
        teacher_weight,
        terms,
        ignore_index,
        chunk_tokens,
        wants_x,
        wants_weight,
    )
    losses = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    logits = _logits(chunk_tokens, vocab_size, x)
    teacher_logits = logits if teacher_weight is None else _logits(chunk_tokens, vocab_size, x)
    summed = grad_weight
    if wants_weight and summed_wide(num_tokens, chunk_tokens) and grad_weight.dtype != torch.float32:
        summed = torch.empty(grad_weight.shape, dtype=torch.float32, device=x.device)
    for begin in range(0, num_tokens, chunk_tokens):
        part = slice(begin, min(begin + chunk_tokens, num_tokens))
        chunk, theirs = logits[: part.stop - begin], teacher_logits[: part.stop - begin]
        torch.mm(x[part], weight.T, out=chunk)
        if teacher_hidden is not None and teacher_weight is not None:
            torch.mm(teacher_hidden[part], teacher_weight.T, out=theirs)
        _cross_entropy(
            chunk, theirs, targets[part], losses[part], factor, terms, ignore_index,
            has_teacher=teacher_weight is not None, wants_grad=wants_x or wants_weight,
        )  # fmt: skip
        if wants_x:
            torch.mm(chunk, weight, out=grad_x[part])
        if wants_weight:
            add_product(summed, chunk.T, x[part], first=begin == 0)
    if summed is not grad_weight:
        grad_weight.copy_(summed)
    return losses.sum(), grad_x, grad_weight.zero_() if wants_weight and not num_tokens else grad_weight


_loss_op = torch.library.custom_op("hone::linear_cross_entropy", _loss, mutates_args=())


@_loss_op.register_fake
def _loss_fake(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    factor: Tensor,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    terms: list[float],
    ignore_index: int,
    chunk_tokens: int,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty(x.shape if wants_x else (0,), dtype=x.dtype, device=x.device)
    grad_weight = torch.empty(weight.shape if wants_weight else (0,), dtype=weight.dtype, device=x.device)
    return torch.empty((), dtype=torch.float32, device=x.device), grad_x, grad_weight


def _logits(chunk_tokens: int, vocab_size: int, x: Tensor) -> Tensor:
    """An empty tensor [R, V] whose rows are aligned to cache lines."""
    return torch.empty(chunk_tokens, -(-vocab_size // 64) * 64, dtype=x.dtype, device=x.device)[:, :vocab_size]


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """total (+)= left @ right, on a GPU summed in total's dtype inside the product."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, beta=0 if first else 1, out=total)
    else:
        product = (left @ right).to(total.dtype)
        total.copy_(product) if first else total.add_(product)


def _lift(dtype: torch.dtype) -> float:
    """The power of two that gradients are scaled by: those of rare tokens are below float16's range."""
    return 256.0 if dtype == torch.float16 else 1.0


ROW_BLOCK = (8192, 16, 3)
"""(columns per block, warps, blocks in flight) of the kernel that reads a row of logits."""


def row_block(num_values: int) -> tuple[int, int, int]:
    """`ROW_BLOCK` for rows of `num_values`: a short row has one block."""
    block, warps, stages = ROW_BLOCK
    return min(block, 1 << (num_values - 1).bit_length()), warps, stages


def _cross_entropy(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    factor: Tensor,
    terms: list[float],
    ignore_index: int,
    *,
    has_teacher: bool,
    wants_grad: bool,
) -> None:
    from hone.ops.loss.triton_kernels import cross_entropy_rows

    z_loss, smoothing, alpha, temperature = terms
    block, warps, stages = row_block(logits.shape[1])
    cross_entropy_rows[(len(logits),)](
        logits, teacher_logits, targets, losses, factor, logits.stride(0), teacher_logits.stride(0), logits.shape[1],
        ignore_index, _lift(logits.dtype), z_loss, smoothing, alpha, temperature,
        TEACHER=has_teacher, SMOOTH=smoothing != 0, GRAD=wants_grad, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.lift = _lift(inputs[0].dtype)


def _scaled(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    scale = upstream / ctx.lift
    wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[:2])
    return *((grad * scale).to(grad.dtype) if wants else None for grad, wants in wanted), *[None] * 9


_loss_op.register_autograd(_scaled, setup_context=_setup)
