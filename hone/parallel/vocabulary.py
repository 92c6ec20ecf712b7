"""Cross entropy over a vocabulary of which each rank has some rows: chunk by chunk, no rank ever has all logits.

Legend: T tokens, V rows of this rank, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.parallel.axis import Axis

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""


def vocabulary_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    axis: Axis,
    first: int,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """The loss in nats summed over the valid targets: a float32 scalar, equal on every rank of `axis`.

    This rank has rows `first` to `first + V` of the head. The gradient of `x_TD` is this rank's part: the sum over the ranks
    is the whole (`regions.copied`). The largest logit and the sum of exponentials are those of all ranks: a loss that takes
    its own rows' sum for the whole is off by about log n. Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    return _Loss.apply(x_TD, weight_VD, targets_T, axis, first, ignore_index, softcap, chunk_tokens)  # type: ignore[no-any-return]


class _Loss(torch.autograd.Function):
    """The gradients are computed beside the loss, as long as a chunk's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, axis: Axis, first: int, ignored: int,
        softcap: float | None, chunk: int,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        x_gradient = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for begin in range(0, len(x), chunk):
            part, wanted = x[begin : begin + chunk], targets[begin : begin + chunk]
            logits = (part @ weight.T).to(wide)
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            largest = logits.amax(-1)
            _done(axis.all_reduce(largest, largest=True))
            place, valid = wanted - first, wanted != ignored
            own = valid & (place >= 0) & (place < len(weight))
            place = torch.where(own, place, 0)[:, None]
            chosen = (logits.gather(1, place)[:, 0] - largest).masked_fill(~own, 0)
            exponentials = (logits - largest[:, None]).exp_()
            sums = torch.stack([exponentials.sum(-1), chosen])
            _done(axis.all_reduce(sums))
            total += ((sums[0].log() - sums[1]) * valid).sum()
            if x_gradient is None and weight_gradient is None:
                continue
            slope = exponentials.div_(sums[0][:, None])
            slope.scatter_add_(1, place, -own[:, None].to(wide))
            slope *= valid[:, None]
            if softcap is not None:
                slope *= 1 - (logits / softcap) ** 2
            if x_gradient is not None:
                x_gradient[begin : begin + chunk] = slope.to(x.dtype) @ weight
            if weight_gradient is not None:
                weight_gradient += slope.to(x.dtype).T @ part
        ctx.save_for_backward(x_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        found = [None if one is None else one * factor.to(one.dtype) for one in ctx.saved_tensors]
        return (*found, None, None, None, None, None, None)


def _done(transfer: Any) -> None:
    if transfer is not None:
        transfer.wait()
