"""Cross entropy and distillation over a vocabulary of which each rank has some rows: chunk by chunk, no rank ever has all logits.

Legend: T tokens, V rows of this rank, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.cost.chunks import VOCABULARY_CHUNK, kernel_chunk_tokens
from hone.ops.loss.api import add_product, scale_, summed_wide
from hone.ops.loss.divergence import FORWARD_KL, Divergence, terms
from hone.ops.loss.rows import row_gradients_, row_sums
from hone.parallel.axis import Axis


class Teacher(NamedTuple):
    """As `hone.ops.loss.reference.Teacher`: `hidden` [T, E] is of all tokens, `weight` [V, E] are this rank's rows of its head."""

    hidden: Tensor
    weight: Tensor
    alpha: float
    temperature: float = 1.0
    softcap: float | None = None
    divergence: Divergence = FORWARD_KL


def vocabulary_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    axis: Axis,
    first: int,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    teacher: Teacher | None = None,
) -> Tensor:
    """The loss in nats summed over the valid targets: a float32 scalar, equal on every rank of `axis`.

    This rank has rows `first` to `first + V` of the head. The gradient of `x_TD` is this rank's part: the sum over the ranks
    is the whole (`regions.copied`). The sum of exponentials is that of all ranks: a loss that takes its own rows' sum for the
    whole is off by about log n. Shoeybi et al. 2019, arXiv:1909.08053, section 3.

    With a `teacher` it is alpha t^2 D(softmax(teacher / t), softmax(student / t)) + (1 - alpha) of that, D the teacher's divergence:
    both softmaxes are over all ranks' rows, whose largest logits and sums are exchanged together.
    """
    if chunk_tokens is None:
        chunk_tokens = kernel_chunk_tokens(len(x_TD)) if x_TD.is_cuda else VOCABULARY_CHUNK
    return _Loss.apply(x_TD, weight_VD, targets_T, axis, first, ignore_index, softcap, chunk_tokens, teacher)  # type: ignore[no-any-return]


class _Loss(torch.autograd.Function):
    """The gradients are computed beside the loss, as long as a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, axis: Axis, first: int, ignored: int,
        softcap: float | None, chunk: int, teacher: Teacher | None,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        x_gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            summed = wide if not x.is_cuda or summed_wide(len(x), chunk) else weight.dtype
            weight_gradient = torch.zeros_like(weight, dtype=summed)
        for begin in range(0, len(x), chunk):
            part, wanted = x[begin : begin + chunk], targets[begin : begin + chunk]
            logits = part @ weight.T
            if softcap is not None or teacher is not None or not x.is_cuda:  # kernels widen what they read
                logits = _capped(logits.to(wide), softcap)
            place, valid = wanted - first, wanted != ignored
            slope = None if softcap is None else 1 - (logits / softcap).square()
            if teacher is None:
                losses, gradient = _text(logits, place, valid, axis, any(ctx.needs_input_grad[:2]))
            else:
                theirs = (teacher.hidden[begin : begin + chunk] @ teacher.weight.T).to(wide)
                losses, gradient = _distilled(logits, _capped(theirs, teacher.softcap), place, valid, axis, teacher)
            total += (losses * valid).sum()
            if gradient is None:
                continue
            if slope is not None:
                gradient *= slope
            gradient = gradient.to(x.dtype)
            if x_gradient is not None:
                torch.mm(gradient, weight, out=x_gradient[begin : begin + chunk])
            if weight_gradient is not None:
                add_product(weight_gradient, gradient.T, part, first=False)
        ctx.save_for_backward(x_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        found = [None if one is None else _times(one, factor) for one in ctx.saved_tensors]
        return (*found, None, None, None, None, None, None, None)


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """`gradient` times a float32 factor, which rounded to bfloat16 would make every gradient of the model wrong by up to 0.4 %."""
    if not gradient.is_cuda:
        return gradient * factor  # a scalar keeps its dtype there
    scale_(gradient, factor.reshape(1).float())
    return gradient


def _text(logits: Tensor, place: Tensor, valid: Tensor, axis: Axis, wants: bool) -> tuple[Tensor, Tensor | None]:
    """(losses [T], where it `wants` it their gradient by this rank's logits [T, V], in their place); `place` [T] is the target's column,
    here or elsewhere."""
    own = row_sums(logits, place)
    every = own.new_empty(axis.size, *own.shape)
    _done(axis.all_gather(every.view(-1), own.view(-1)))
    log_sum, chosen = every[:, 0].logsumexp(0), every[:, 1].sum(0)
    return log_sum - chosen, row_gradients_(logits, place, log_sum, valid) if wants else None


def _distilled(
    student: Tensor, theirs: Tensor, place: Tensor, valid: Tensor, axis: Axis, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """`_text` with a teacher's logits [T, V]: two exchanges of a few numbers a token, three for divergences other than forward KL,
    where one is enough without."""
    alpha, temperature = teacher.alpha, teacher.temperature
    own = valid & (place >= 0) & (place < student.shape[1])
    place = torch.where(own, place, 0)[:, None]
    largest = torch.stack([student.amax(-1), theirs.amax(-1)])
    _done(axis.all_reduce(largest, largest=True))
    student, theirs = student - largest[0][:, None], theirs - largest[1][:, None]
    chosen = student.gather(1, place)[:, 0].masked_fill(~own, 0)
    soft, wanted = (student / temperature).exp_(), (theirs / temperature).exp_()
    plain = soft if temperature == 1.0 else student.exp()
    distance = (wanted * (theirs - student)).sum(-1) / temperature
    sums = torch.stack([soft.sum(-1), wanted.sum(-1), plain.sum(-1), distance, chosen])
    _done(axis.all_reduce(sums))
    if teacher.divergence.kind == "forward_kl":
        divergence = sums[3] / sums[1] - sums[1].log() + sums[0].log()
        slope = (soft / sums[0][:, None]).sub_(wanted.div_(sums[1][:, None]))
    else:
        log_p, log_q = theirs / temperature - sums[1].log()[:, None], student / temperature - sums[0].log()[:, None]
        parts, slopes = terms(teacher.divergence, log_p, log_q)
        q = log_q.exp()
        found = torch.stack([parts.sum(-1), (q * slopes).sum(-1)])
        _done(axis.all_reduce(found))
        divergence, slope = found[0], slopes.sub_(found[1][:, None]).mul_(q)
    slope.mul_(alpha * temperature)
    losses = alpha * temperature**2 * divergence + (1 - alpha) * (sums[2].log() - sums[4])
    slope.addcdiv_(plain, sums[2][:, None].expand_as(plain), value=1 - alpha)
    slope.scatter_add_(1, place, (alpha - 1) * own[:, None].to(slope.dtype))
    return losses, slope.mul_(valid[:, None])


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _done(transfer: Any) -> None:
    if transfer is not None:
        transfer.wait()
