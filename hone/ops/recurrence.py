"""scan: linear attention with decays, as a recurrence token by token, in chunks of plain torch, and in Triton."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.dispatch import backend_of, locate

CHUNK = 64
"""Tokens a chunk of the plain torch form."""

CHANNEL_CHUNK = 16
"""The same with a decay a channel, whose weights [C, C, Dk] stand in memory one chunk at a time."""


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    scale: float = 1.0,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_t = scale * q_t S_t with S_t = exp(decay_t) S_{t-1} + k_t^T v_t, causal and in time linear in the length.

    q, k [B, S, H, Dk] and v [B, S, H, Dv], head dimensions up to 256; any of them may have fewer heads, a divisor of H,
    each then serving consecutive heads. `decay` is the logarithm, <= 0 and finite: None (linear attention,
    arXiv:2006.16236), [H] (retention, arXiv:2307.08621), [B, S, H] (Mamba-2, arXiv:2405.21060) or [B, S, H, Dk] (gated
    linear attention, arXiv:2312.06635). `state` [B, H, Dk, Dv] float32 is S before the first token (zero if None).
    `reset` bool [B, S]: a document starts at this token and sees nothing before it, the state included.
    Returns out [B, S, H, Dv] in v's dtype, with `return_state` also the state after the last token. Differentiable in
    q, k, v, decay and state.
    """
    heads = _checked(q, k, v, decay, state, reset)
    if scale == 0:
        raise ValueError("scan: scale is 0")
    form = "none" if decay is None else {1: "head", 3: "token", 4: "channel"}[decay.dim()]
    chosen = backend_of(
        "scan", q.device, backend, dtype=q.dtype, dim_k=q.shape[-1], dim_v=v.shape[-1], seq_len=q.shape[1], decay=form
    )
    if chosen == "reference":
        out, final = scan_chunks(q, k, v, decay, state=state, reset=reset, scale=scale)
    elif chosen == "triton":
        out, final = _triton(q, k, v, decay, state, reset, scale, heads)
    else:
        raise ValueError(f"scan has no backend '{chosen}': it is 'reference' or 'triton'")
    return (out, final) if return_state else out


def scan_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The definition, one token at a time: (out, final state) in float32, or float64 if q is. Arguments as `scan`'s."""
    heads = _checked(q, k, v, decay, state, reset)
    q, k, v, now = _wide(q, k, v, state, heads)
    out = []
    for token in range(q.shape[1]):
        if decay is not None:
            step = decay if decay.dim() == 1 else decay[:, token]
            step = step.to(q.dtype).exp()
            now = now * (step[..., None] if decay.dim() == 4 else step[..., None, None])
        if reset is not None:
            now = torch.where(reset[:, token, None, None, None], 0.0, now)
        now = now + k[:, token, :, :, None] * v[:, token, :, None, :]
        out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, token], now))
    return torch.stack(out, 1), now


def scan_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`scan_steps` in chunks of matrix products: (out in v's dtype, final state float32 or float64). Plain torch.

    No weight is ever the exponential of a positive number: within a chunk it is exp(c_s - c_t), s >= t, of cumulative
    log decays c, so decays may be as strong as they like.
    """
    heads = _checked(q, k, v, decay, state, reset)
    dtype = v.dtype
    q, k, v, now = _wide(q, k, v, state, heads)
    q = q * scale
    if chunk is None:
        chunk = CHANNEL_CHUNK if decay is not None and decay.dim() == 4 else CHUNK
    out = []
    for first in range(0, q.shape[1], chunk):
        part = slice(first, first + chunk)
        fall = None if decay is None else _fallen(decay, part, q)
        begins = None if reset is None else reset[:, part]
        mixed, now = _one_chunk(q[:, part], k[:, part], v[:, part], fall, begins, now)
        out.append(mixed)
    return torch.cat(out, 1).to(dtype), now


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    scale: float,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """The Triton form, with head dimensions padded to what its descriptors can address: 16 bytes."""
    dim_k, dim_v = q.shape[-1], v.shape[-1]
    more_k, more_v = -dim_k % 8, -dim_v % 8
    if more_k or more_v:
        q, k, v = F.pad(q, (0, more_k)), F.pad(k, (0, more_k)), F.pad(v, (0, more_v))
        state = None if state is None else F.pad(state, (0, more_v, 0, more_k))
    out, final, _ = _scan(q, k, v, decay, None if state is None else state.float(), reset, scale)
    return out[..., :dim_v], final[..., :dim_k, :dim_v]


@torch.library.custom_op("hone::scan", mutates_args=())
def _scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, reset: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final state, state each segment starts from: none where a head is one segment)."""
    from hone.ops.triton.scan import Fall, outputs, segment_states

    plan, heads = _plan(q, k, v)
    q, k, v = (_addressable(x) for x in (q, k, v))
    fall = Fall(decay, reset)
    final = q.new_empty((q.shape[0], heads, q.shape[-1], v.shape[-1]), dtype=torch.float32)
    if plan.segments > 1:
        starts = segment_states(k, v, fall, heads, plan, state)
        out, _ = outputs(q, k, v, fall, heads, scale, plan, starts, final=final)
        return out, final, starts
    begin = None if state is None else state[:, :, None]
    out, _ = outputs(q, k, v, fall, heads, scale, plan, begin, final=final)
    return out, final, final.new_empty((q.shape[0], heads, 0, *final.shape[2:]))


@_scan.register_fake
def _(q, k, v, decay, state, reset, scale):
    plan, heads = _plan(q, k, v)
    state_shape = (q.shape[-1], v.shape[-1])
    final = q.new_empty((q.shape[0], heads, *state_shape), dtype=torch.float32)
    starts = final.new_empty((q.shape[0], heads, plan.segments if plan.segments > 1 else 0, *state_shape))
    return v.new_empty((*v.shape[:2], heads, v.shape[-1])), final, starts


@torch.library.custom_op("hone::scan_backward", mutates_args=())
def _scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    scale: float,
    starts: Tensor,
    final: Tensor,
    d_out: Tensor,
    d_final: Tensor,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv with all heads apart, d_state [B, H, Dk, Dv], d_decay [B, S, H], empty unless `decays`)."""
    from hone.ops.triton.scan import Fall
    from hone.ops.triton.scan_backward import gradients

    plan, heads = _plan(q, k, v)
    q, k, v, d_out = (_addressable(x) for x in (q, k, v, d_out))
    if plan.segments == 1:
        starts = None if state is None else state[:, :, None]
    dq, dk, dv, d_state, d_decay = gradients(
        q, k, v, Fall(decay, reset), heads, scale, plan, starts, final, d_out, d_final, decays=decays
    )
    return dq, dk, dv, d_state, d_state.new_empty(0) if d_decay is None else d_decay


@_scan_backward.register_fake
def _(q, k, v, decay, state, reset, scale, starts, final, d_out, d_final, decays):
    heads = final.shape[1]
    dq, dk, dv = (x.new_empty((*x.shape[:2], heads, x.shape[-1])) for x in (q, k, v))
    d_decay = final.new_empty((*q.shape[:2], heads) if decays else (0,))
    return dq, dk, dv, torch.empty_like(final), d_decay


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, decay, state, reset, ctx.scale = inputs
    _, final, starts = output
    ctx.save_for_backward(q, k, v, decay, state, reset, starts, final)


def _pull(ctx: Any, d_out: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, decay, state, reset, starts, final = ctx.saved_tensors
    decays = decay is not None and ctx.needs_input_grad[3]
    dq, dk, dv, d_state, d_decay = _scan_backward(
        q, k, v, decay, state, reset, ctx.scale, starts, final, d_out, d_final, decays
    )
    grads = [
        grad if grad.shape == x.shape else grad.unflatten(2, (x.shape[2], -1)).sum(3)
        for x, grad in ((q, dq), (k, dk), (v, dv))
    ]
    if decays and decay.dim() == 1:
        d_decay = d_decay.sum((0, 1))
    return *grads, d_decay.to(decay.dtype) if decays else None, d_state if state is not None else None, None, None


_scan.register_autograd(_pull, setup_context=_keep)


def _plan(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, int]:
    """(tiling, heads) of a scan: the same forward, backward and under fake tensors."""
    from hone.ops.triton.scan import tiling

    heads = max(q.shape[2], k.shape[2], v.shape[2])
    num_sms = locate(q.device).num_sms or 132
    return tiling(q.shape[0], heads, q.shape[1], q.shape[-1], v.shape[-1], num_sms), heads


def _addressable(x: Tensor) -> Tensor:
    """x, copied if a descriptor cannot address it: last axis contiguous, every stride a positive multiple of 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    fits = x.stride(-1) == 1 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, fall: Tensor | None, begins: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs [B, C, H, Dv], state after the chunk); `fall` [B or 1, C, H, 1 or Dk] is the log decay since its start."""
    size = q.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()[None, :, :, None]  # [B, row, column, H]
    if fall is None:
        fall = q.new_zeros(1, size, 1, 1)
    first = last = torch.ones((), dtype=torch.bool, device=q.device)
    through = first
    if begins is not None:
        document = begins.cumsum(1)
        seen = seen & (document[:, :, None] == document[:, None, :])[..., None]
        first = (document == 0)[..., None, None]
        last = (document == document[:, -1:])[..., None, None]
        through = (document[:, -1] == 0)[:, None, None, None]
    drop = (
        (fall[:, :, None] - fall[:, None, :]).masked_fill(~seen[..., None], -torch.inf).exp()
    )  # [B, row, column, H, *]
    if fall.shape[-1] == 1:
        scores = torch.einsum("bshd,bthd->bsth", q, k) * drop[..., 0]
    else:
        scores = torch.einsum("bshd,bthd,bsthd->bsth", q, k, drop)
    entering = torch.where(first, fall.exp(), 0.0) * q
    leaving = torch.where(last, (fall[:, -1:] - fall).exp(), 0.0) * k
    out = torch.einsum("bsth,bthv->bshv", scores, v) + torch.einsum("bshd,bhdv->bshv", entering, state)
    kept = torch.where(through, fall[:, -1].exp()[..., None], 0.0) * state
    return out, kept + torch.einsum("bthd,bthv->bhdv", leaving, v)


def _fallen(decay: Tensor, part: slice, like: Tensor) -> Tensor:
    """Cumulative log decay of one chunk, [B or 1, C, H, 1 or Dk]."""
    decay = decay.to(like.dtype)
    if decay.dim() == 1:
        size = len(range(*part.indices(like.shape[1])))
        return (
            decay[None, None, :, None] * torch.arange(1, size + 1, device=like.device, dtype=like.dtype)[:, None, None]
        )
    steps = decay[:, part].cumsum(1)
    return steps if steps.dim() == 4 else steps[..., None]


def _wide(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All in float32 or float64, with heads repeated where they are shared, and a state of zeros where there is none."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide).repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    if state is None:
        state = q.new_zeros(q.shape[0], heads, q.shape[-1], v.shape[-1])
    return q, k, v, state.to(wide)


def _checked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, reset: Tensor | None) -> int:
    """The number of heads; raises ValueError naming the argument that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[:2] != q.shape[:2]:
            raise ValueError(f"scan: {name} must be [B, S, H, D] like q {tuple(q.shape)}, is {tuple(x.shape)}")
    batch, seq_len, _, dim_k = q.shape
    heads = max(q.shape[2], k.shape[2], v.shape[2])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if heads % x.shape[2]:
            raise ValueError(f"scan: {name} has {x.shape[2]} heads, which do not divide {heads}")
    if seq_len == 0:
        raise ValueError("scan: no tokens")
    if k.shape[-1] != dim_k:
        raise ValueError(f"scan: k has head dimension {k.shape[-1]}, q {dim_k}")
    shapes = {1: (heads,), 3: (batch, seq_len, heads), 4: (batch, seq_len, heads, dim_k)}
    if decay is not None and decay.shape != shapes.get(decay.dim()):
        raise ValueError(f"scan: decay {tuple(decay.shape)} is none of {', '.join(map(str, shapes.values()))}")
    if state is not None and state.shape != (batch, heads, dim_k, v.shape[-1]):
        raise ValueError(f"scan: state {tuple(state.shape)} is not {(batch, heads, dim_k, v.shape[-1])}")
    if reset is not None and (reset.shape != (batch, seq_len) or reset.dtype != torch.bool):
        raise ValueError(f"scan: reset must be bool {(batch, seq_len)}, is {reset.dtype} {tuple(reset.shape)}")
    return heads
