"""Each op in plain torch, right in any floating dtype: the oracle of every fast twin and the CPU path.

Legend: B batch, S sequence, H query heads, KV key/value heads, Dh head width, D hidden width, V vocabulary, T tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 inside and in x's dtype outside. arXiv:1910.07467."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + Dh/2]) of x [..., heads, Dh] by the angles in cos, sin [..., 1, Dh/2]. arXiv:2104.09864."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of the last axis: [..., 2F] -> [..., F]. arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Softmax attention written out: q [B, S, H, Dh], k and v [B, S, KV, Dh] -> [B, S, H, Dh]. arXiv:1706.03762.

    H is a multiple of KV (consecutive query heads share a key head). With `window` w a token sees itself and the
    w - 1 before it. `document_ids` [B, S] keeps documents apart. Inputs in float64 give an answer in float64.
    """
    seq_len, groups = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    place = torch.arange(seq_len, device=q.device)
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device)
    if causal:
        seen &= place[None, :] <= place[:, None]
    if window is not None:
        seen &= place[None, :] > place[:, None] - window
    seen = seen[None, None]
    if document_ids is not None:
        seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: Literal["sum", "mean"] = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of softmax(x W^T) against `targets`, in nats, without ever holding all logits; a scalar.

    x [..., D] in any floating dtype, weight [V, D], targets int64 [...] with `ignore_index` where there is none.
    `z_loss` adds z_loss * log(sum(exp(logits)))^2 a token (Chowdhery et al. 2022, arXiv:2204.02311, section 5).
    'mean' divides by the valid targets (NaN when there is none). The loss is float32 (float64 for float64 inputs).
    """
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    if not torch.is_grad_enabled():  # a Function asks its inputs alone, and would make gradients that nobody takes
        x, weight = x.detach(), weight.detach()
    total: Tensor = _LinearCrossEntropy.apply(x, weight, targets, ignore_index, z_loss)
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made beside the loss, while a chunk's logits are at hand, so the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        # Slopes of rare tokens are below float16's range; a power of two lifts them and is taken out again.
        ctx.lift = 256.0 if x.dtype == torch.float16 else 1.0
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=exact, device=x.device)
        rows = chunk_rows(x.device.type, len(weight))
        for begin in range(0, len(x), rows):
            part = x[begin : begin + rows]
            logits = (part @ weight.T).to(exact)
            loss, slope = _cross_entropy_chunk(
                logits,
                targets[begin : begin + rows],
                ignore_index,
                z_loss,
                grad_x is not None or grad_weight is not None,
            )
            total += loss
            if slope is None:
                continue
            slope = slope.mul_(ctx.lift).to(x.dtype)
            if grad_x is not None:
                torch.mm(slope, weight, out=grad_x[begin : begin + rows])
            if grad_weight is not None:
                if exact == x.dtype:
                    grad_weight.addmm_(slope.T, part)
                else:
                    grad_weight += slope.T @ part
        ctx.dtypes = x.dtype, weight.dtype
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = upstream / ctx.lift
        if grad_x is not None:
            grad_x = (grad_x * scale).to(ctx.dtypes[0])
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.dtypes[1])
        return grad_x, grad_weight, None, None, None


def chunk_rows(device_type: str, vocab_size: int) -> int:
    """Tokens whose logits are held at once: what stays in a CPU's cache (4 MiB), what fills a GPU (512 MiB)."""
    return max(64, (1 << 20) // vocab_size) if device_type == "cpu" else max(1024, (1 << 27) // vocab_size)


def _cross_entropy_chunk(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, wants_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss summed over the valid rows of logits [T, V] and, if wanted, its slope by the logits (made in their place)."""
    valid = targets != ignore_index
    chosen = targets.masked_fill(~valid, 0)[:, None]
    log_sum = logits.logsumexp(-1)
    losses = log_sum - logits.gather(1, chosen)[:, 0]
    if z_loss:
        losses = losses + z_loss * log_sum.square()
    total = losses.masked_fill(~valid, 0).sum()
    if not wants_slope:
        return total, None
    slope = logits.sub_(log_sum[:, None]).exp_()
    if z_loss:
        slope *= (1 + 2 * z_loss * log_sum)[:, None]
    slope.scatter_add_(1, chosen, torch.full_like(chosen, -1, dtype=slope.dtype))
    slope *= valid[:, None]
    return total, slope
