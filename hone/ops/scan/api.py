"""scan and scan_delta: linear attention with decays, token by token, in chunks of plain torch, and (scan) in Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
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
    q, k, v, decay and state. Raises SpecError naming the argument whose shape, dtype, device or value does not fit.
    """
    _checked(q, k, v, decay, state, reset)
    if not 0 < abs(scale) < math.inf:
        raise SpecError(f"scan: scale is {scale}; it must be finite and not 0", fix="leave scale out for 1")
    form = "none" if decay is None else {1: "head", 3: "token", 4: "channel"}[decay.dim()]
    chosen = backend_of(
        "scan", q.device, backend, dtype=q.dtype, dim_k=q.shape[-1], dim_v=v.shape[-1], seq_len=q.shape[1], decay=form
    )
    if chosen == "reference" or not len(q):
        out, final = scan_chunks(q, k, v, decay, state=state, reset=reset, scale=scale)
    else:
        out, final = _on_gpu(q, k, v, decay, state, reset, scale, chosen)
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


def scan_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    scale: float = 1.0,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out_t = scale * q_t S_t with S_t = exp(decay_t) (1 - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t: the delta rule.

    What the state already says of a key is replaced, not added to. q, k [B, S, H, Dk], keys of length 1; v [B, S, H, Dv];
    beta [B, S, H] in [0, 1]; decay None (DeltaNet, arXiv:2406.06484), [H] or [B, S, H] (Gated DeltaNet, arXiv:2412.06464).
    Shared heads, `state`, `reset`, `return_state` and dtypes as in `scan`. Differentiable in all but `reset`.

    Plain torch on every device, a GPU too; no kernel. Chunks of 64 tokens one after the other: in each a triangular system
    gives what every token really adds (the WY form), and the rest is a chunk of `scan`.
    """
    heads = _checked(q, k, v, decay, state, reset)
    if beta.shape != (*q.shape[:2], heads):
        raise SpecError(
            f"scan_delta: beta {tuple(beta.shape)} is not {(*q.shape[:2], heads)}", fix="give beta [B, S, H]"
        )
    if decay is not None and decay.dim() == 4:
        said = f"scan_delta: decay is a number a head or a token, not a channel as in {tuple(decay.shape)}"
        raise SpecError(said, fix="give decay [H] or [B, S, H], or call scan, which takes [B, S, H, Dk]")
    dtype = v.dtype
    q, k, v, now = _wide(q, k, v, state, heads)
    beta = beta.to(q.dtype)[..., None]
    out = []
    for first in range(0, q.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        fall = None if decay is None else _fallen(decay, part, q)
        begins = None if reset is None else reset[:, part]
        entering, _, _, drop = _weights(k[:, part], fall, begins)
        told = v[:, part] - torch.einsum("bshd,bhdv->bshv", entering * k[:, part], now)
        # added_s + beta_s sum_{t < s} (k_s . k_t) drop_st added_t = beta_s told_s; what stands on the diagonal is not read.
        alike = torch.einsum("bshd,bthd,bsth->bhst", beta[:, part] * k[:, part], k[:, part], drop[..., 0])
        wanted = (beta[:, part] * told).transpose(1, 2)
        added = torch.linalg.solve_triangular(alike, wanted, upper=False, unitriangular=True)
        mixed, now = _one_chunk(q[:, part] * scale, k[:, part], added.transpose(1, 2), fall, begins, now)
        out.append(mixed)
    mixed = torch.cat(out, 1).to(dtype)
    return (mixed, now) if return_state else mixed


def _on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The kernels, with head dimensions padded to what their descriptors can address: 16 bytes."""
    dim_k, dim_v = q.shape[-1], v.shape[-1]
    more_k, more_v = -dim_k % 8, -dim_v % 8
    if more_k or more_v:
        q, k, v = F.pad(q, (0, more_k)), F.pad(k, (0, more_k)), F.pad(v, (0, more_v))
        state = None if state is None else F.pad(state, (0, more_v, 0, more_k))
        decay = F.pad(decay, (0, more_k)) if decay is not None and decay.dim() == 4 else decay
    state = None if state is None else state.float().contiguous()
    reset = None if reset is None else reset.contiguous()
    out, final, _ = scan_forward(q, k, v, decay, state, reset, scale, backend)
    return out[..., :dim_v], final[..., :dim_k, :dim_v]


@torch.library.custom_op("hone::scan", mutates_args=())
def scan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final state, state each segment starts from: none where a head is one segment)."""
    from hone.ops.scan.triton_kernels import Fall

    plan, heads = _plan(q, k, v, decay)
    q, k, v = (_addressable(x) for x in (q, k, v))
    fall = Fall(_addressable(decay) if decay is not None and decay.dim() == 4 else decay, reset)
    final = q.new_empty((q.shape[0], heads, q.shape[-1], v.shape[-1]), dtype=torch.float32)
    nothing = final.new_empty((q.shape[0], heads, 0, *final.shape[2:]))
    if fall.channels is not None:
        from hone.ops.scan import triton_channel as scan_channel

        out, starts = scan_channel.forward(q, k, v, heads, scale, plan, state, fall, final)
        return out, final, starts if plan.segments > 1 else nothing
    segment_states, outputs = _passes(backend, fall, q, heads)
    if plan.segments > 1:
        starts = segment_states(k, v, heads, plan, state, fall=fall)
        out, _ = outputs(q, k, v, heads, scale, plan, starts, final=final)
        return out, final, starts
    begin = None if state is None else state[:, :, None]
    out, _ = outputs(q, k, v, heads, scale, plan, begin, final=final)
    return out, final, nothing


@scan_forward.register_fake
def _(q, k, v, decay, state, reset, scale, backend):
    plan, heads = _plan(q, k, v, decay)
    state_shape = (q.shape[-1], v.shape[-1])
    final = q.new_empty((q.shape[0], heads, *state_shape), dtype=torch.float32)
    starts = final.new_empty((q.shape[0], heads, plan.segments if plan.segments > 1 else 0, *state_shape))
    return v.new_empty((*v.shape[:2], heads, v.shape[-1])), final, starts


@torch.library.custom_op("hone::scan_backward", mutates_args=())
def scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    reset: Tensor | None,
    scale: float,
    backend: str,
    starts: Tensor,
    final: Tensor,
    d_out: Tensor,
    d_final: Tensor,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a scan: the forward's own kernels, with the roles of the tensors exchanged and time turned round.

    With c the cumulative log decay and w = exp(c_s - c_t) the weight of token t at s >= t (scale apart):

        dq_s = sum_{t <= s} w (do_s . v_t) k_t      rows do, keys v, values k, states S^T, in time's order
        dv_t = sum_{s >= t} w (k_t . q_s) do_s      rows k, keys q, values do, states dS, backwards
        dk_t = sum_{s >= t} w (v_t . do_s) q_s      rows v, keys do, values q, states dS^T, backwards

    The states S come from the forward pass; those of dS need one more pass over q and do. Returns dq, dk, dv with all
    heads apart, d_state [B, H, Dk, Dv], and the gradient of the decays [B, S, H (, Dk)], empty unless `decays`.
    """
    from hone.ops.scan.triton_kernels import Fall, decay_gradient

    plan, heads = _plan(q, k, v, decay)
    q, k, v, d_out = (_addressable(x) for x in (q, k, v, d_out))
    fall = Fall(_addressable(decay) if decay is not None and decay.dim() == 4 else decay, reset)
    if plan.segments == 1:
        starts = None if state is None else state[:, :, None]
    # Every kernel multiplies by `scale`, but what comes from the final state must not be: divided beforehand.
    d_final = d_final.contiguous()
    if fall.channels is not None:
        from hone.ops.scan import triton_channel as scan_channel

        return scan_channel.backward(q, k, v, heads, scale, plan, starts, fall, final, d_out, d_final, decays)
    segment_states, outputs = _passes(backend, fall, q, heads)
    ends = segment_states(q, d_out, heads, plan, d_final / scale, fall=fall, reverse=True)
    d_state = torch.empty_like(final)
    turned = None if starts is None else starts.transpose(-1, -2)
    dq, of_q = outputs(d_out, v, k, heads, scale, plan, turned, dots_with=q if decays else None)
    dv, _ = outputs(k, q, d_out, heads, scale, plan, ends, reverse=True, final=d_state)
    back = ends.transpose(-1, -2)
    dk, of_k = outputs(v, d_out, q, heads, scale, plan, back, reverse=True, dots_with=k if decays else None)
    d_state *= scale
    if not decays:
        return dq, dk, dv, d_state, d_state.new_empty(0)
    return dq, dk, dv, d_state, decay_gradient(of_q, of_k, starts, ends, final, d_final, reset, scale, plan)


@scan_backward.register_fake
def _(q, k, v, decay, state, reset, scale, backend, starts, final, d_out, d_final, decays):
    heads = final.shape[1]
    dq, dk, dv = (x.new_empty((*x.shape[:2], heads, x.shape[-1])) for x in (q, k, v))
    channels = decay.shape[3:] if decays else ()
    d_decay = final.new_empty((*q.shape[:2], heads, *channels) if decays else (0,))
    return dq, dk, dv, torch.empty_like(final), d_decay


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, decay, state, reset, ctx.scale, ctx.backend = inputs
    _, final, starts = output
    ctx.save_for_backward(q, k, v, decay, state, reset, starts, final)


def _pull(ctx: Any, d_out: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, decay, state, reset, starts, final = ctx.saved_tensors
    decays = decay is not None and ctx.needs_input_grad[3]
    dq, dk, dv, d_state, d_decay = scan_backward(
        q, k, v, decay, state, reset, ctx.scale, ctx.backend, starts, final, d_out, d_final, decays
    )
    grads = [
        grad if grad.shape == x.shape else grad.unflatten(2, (x.shape[2], -1)).sum(3)
        for x, grad in ((q, dq), (k, dk), (v, dv))
    ]
    if decays and decay.dim() == 1:
        d_decay = d_decay.sum((0, 1))
    d_decay = d_decay.to(decay.dtype) if decays else None
    return *grads, d_decay, d_state if state is not None else None, None, None, None


scan_forward.register_autograd(_pull, setup_context=_keep)


def _passes(backend: str, fall: Any, q: Tensor, heads: int) -> tuple[Any, Any]:
    """The kernels' `segment_states` and `outputs`, the latter told what decays."""
    from hone.ops.scan import triton_kernels as portable

    known: dict[str, Any] = {"fall": fall}
    outputs = portable.outputs
    if backend == "gluon":
        from hone.ops.scan import gluon_outputs as hopper

        known = {"known": hopper.facts(fall, q.shape[0], heads, q.shape[1], q.device)}
        outputs = hopper.outputs
    return portable.segment_states, lambda *given, **options: outputs(*given, **known, **options)


def _plan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> tuple[Any, int]:
    """(tiling, heads) of a scan: the same forward, backward and under fake tensors."""
    from hone.ops.scan.triton_kernels import tiling

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
    entering, leaving, through, drop = _weights(q, fall, begins)
    if drop.shape[-1] == 1:
        scores = torch.einsum("bshd,bthd->bsth", q, k) * drop[..., 0]
    else:
        scores = torch.einsum("bshd,bthd,bsthd->bsth", q, k, drop)
    out = torch.einsum("bsth,bthv->bshv", scores, v) + torch.einsum("bshd,bhdv->bshv", entering * q, state)
    return out, through * state + torch.einsum("bthd,bthv->bhdv", leaving * k, v)


def _weights(like: Tensor, fall: Tensor | None, begins: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What weighs what in a chunk: the incoming state in a token, a token in the outgoing state (both [., C, ., .]), the
    incoming state in the outgoing one, a column's token in a row's [., row, column, H, .]; the last axis 1 or Dk."""
    size = like.shape[1]
    if fall is None:
        fall = like.new_zeros(1, size, like.shape[2], 1)
    seen = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()[None, :, :, None, None]
    first = last = through = torch.ones((), dtype=torch.bool, device=like.device)
    if begins is not None:
        document = begins.cumsum(1)
        seen = seen & (document[:, :, None] == document[:, None, :])[..., None, None]
        first = (document == 0)[..., None, None]
        last = (document == document[:, -1:])[..., None, None]
        through = (document[:, -1] == 0)[:, None, None, None]
    drop = (fall[:, :, None] - fall[:, None, :]).masked_fill(~seen, -torch.inf).exp()
    entering = torch.where(first, fall.exp(), 0.0)
    leaving = torch.where(last, (fall[:, -1:] - fall).exp(), 0.0)
    return entering, leaving, torch.where(through, fall[:, -1].exp()[..., None], 0.0), drop


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
    """The number of heads; raises SpecError naming the argument that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[:2] != q.shape[:2]:
            said = f"scan: {name} must be [B, S, H, D] like q {tuple(q.shape)}, is {tuple(x.shape)}"
            raise SpecError(said, fix="give q, k and v of one B and one S, heads in axis 2")
        if not min(x.shape[2:]):
            said = f"scan: {name} {tuple(x.shape)} has no heads or heads without width"
            raise SpecError(said, fix=f"give {name} at least one head of at least one number")
        if x.dtype != q.dtype or not x.is_floating_point():
            said = f"scan: {name} is {x.dtype}; q, k and v must be of one floating dtype, q is {q.dtype}"
            raise SpecError(said, fix="convert all three to one of bfloat16, float16, float32 with .to(dtype)")
    for name, x in (("k", k), ("v", v), ("decay", decay), ("state", state), ("reset", reset)):
        if x is not None and x.device != q.device:
            raise SpecError(
                f"scan: {name} is on {x.device}, q on {q.device}", fix=f"move it there: {name}.to(q.device)"
            )
    batch, seq_len, _, dim_k = q.shape
    heads = max(q.shape[2], k.shape[2], v.shape[2])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if heads % x.shape[2]:
            said = f"scan: {name} has {x.shape[2]} heads, which do not divide {heads}"
            raise SpecError(said, fix=f"give {name} {heads} heads, or a divisor of {heads} to share them")
    if seq_len == 0:
        raise SpecError(f"scan: q {tuple(q.shape)} has no tokens", fix="give at least one token, or skip the call")
    if k.shape[-1] != dim_k:
        raise SpecError(f"scan: k has head dimension {k.shape[-1]}, q {dim_k}", fix="give q and k heads of one width")
    shapes = {1: (heads,), 3: (batch, seq_len, heads), 4: (batch, seq_len, heads, dim_k)}
    if decay is not None and decay.shape != shapes.get(decay.dim()):
        said = f"scan: decay {tuple(decay.shape)} is none of {', '.join(map(str, shapes.values()))}"
        raise SpecError(said, fix="give a logarithm a head, a token or a channel in one of these shapes, or None")
    if state is not None and state.shape != (batch, heads, dim_k, v.shape[-1]):
        said = f"scan: state {tuple(state.shape)} is not {(batch, heads, dim_k, v.shape[-1])}"
        raise SpecError(said, fix="give the state of a call with return_state=True and these sizes, or None")
    if reset is not None and (reset.shape != (batch, seq_len) or reset.dtype != torch.bool):
        said = f"scan: reset must be bool {(batch, seq_len)}, is {reset.dtype} {tuple(reset.shape)}"
        raise SpecError(said, fix="give True where a document starts: reset.bool(), one entry a token")
    return heads
