"""Linear attention with decays as a scan: public functions, the GPU op and its gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of, locate
from hone.ops.scan.checks import checked_heads
from hone.ops.scan.reference import delta_chunks, scan_chunks


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
    each shared by consecutive heads. `decay` is the logarithm, <= 0 and finite: None (linear attention,
    arXiv:2006.16236), [H] (retention, arXiv:2307.08621), [B, S, H] (Mamba-2, arXiv:2405.21060) or [B, S, H, Dk] (gated
    linear attention, arXiv:2312.06635). `state` [B, H, Dk, Dv] float32 is S before the first token (zero if None).
    `reset` bool [B, S]: a document starts at this token; earlier tokens and the state have no effect on it.
    Returns out [B, S, H, Dv] in v's dtype, with `return_state` also the state after the last token. Differentiable in
    q, k, v, decay and state. Raises SpecError naming the argument whose shape, dtype, device or value does not fit.
    """
    checked_heads(q, k, v, decay, state, reset)
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

    A token replaces the value that the state stores for its key. q, k [B, S, H, Dk], keys of length 1; v [B, S, H, Dv];
    beta [B, S, H] in [0, 1]; decay None (DeltaNet, arXiv:2406.06484), [H] or [B, S, H] (Gated DeltaNet, arXiv:2412.06464).
    Shared heads, `state`, `reset`, `return_state` and dtypes as in `scan`. Differentiable in all but `reset`.

    Plain torch on every device, without a kernel. Chunks of 64 tokens in order: in each the solution of a triangular system
    is each token's change of the state (the WY form), and the rest is a chunk of `scan`.
    """
    heads = checked_heads(q, k, v, decay, state, reset)
    if beta.shape != (*q.shape[:2], heads):
        raise SpecError(
            f"scan_delta: beta {tuple(beta.shape)} is not {(*q.shape[:2], heads)}", fix="give beta [B, S, H]"
        )
    if decay is not None and decay.dim() == 4:
        said = f"scan_delta: decay is one number per head or token, not per channel as in {tuple(decay.shape)}"
        raise SpecError(said, fix="give decay [H] or [B, S, H], or call scan, which takes [B, S, H, Dk]")
    mixed, now = delta_chunks(q, k, v, beta, decay, state=state, reset=reset, scale=scale)
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
    """Runs the kernels, with head dimensions padded to the 16 bytes that their descriptors need."""
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
    """(out, final state, initial state of each segment: empty where a head is one segment)."""
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
    """Gradients of a scan: the forward kernels with the roles of the tensors exchanged and time reversed.

    With c the cumulative log decay and w = exp(c_s - c_t) the weight of token t at s >= t (scale apart):

        dq_s = sum_{t <= s} w (do_s . v_t) k_t      rows do, keys v, values k, states S^T, in time's order
        dv_t = sum_{s >= t} w (k_t . q_s) do_s      rows k, keys q, values do, states dS, backwards
        dk_t = sum_{s >= t} w (v_t . do_s) q_s      rows v, keys do, values q, states dS^T, backwards

    The states S are from the forward pass; those of dS need one more pass over q and do. Returns dq, dk, dv for all H heads
    (not summed over shared ones), d_state [B, H, Dk, Dv], and the gradient of the decays [B, S, H (, Dk)], empty unless `decays`.
    """
    from hone.ops.scan.triton_kernels import Fall, decay_gradient

    plan, heads = _plan(q, k, v, decay)
    q, k, v, d_out = (_addressable(x) for x in (q, k, v, d_out))
    fall = Fall(_addressable(decay) if decay is not None and decay.dim() == 4 else decay, reset)
    if plan.segments == 1:
        starts = None if state is None else state[:, :, None]
    # Every kernel multiplies by `scale`, which must not apply to the final state's gradient: divided beforehand.
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


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, decay, state, reset, ctx.scale, ctx.backend = inputs
    _, final, starts = output
    ctx.save_for_backward(q, k, v, decay, state, reset, starts, final)


def _scan_grad(ctx: Any, d_out: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
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


scan_forward.register_autograd(_scan_grad, setup_context=_save_for_backward)


def _passes(backend: str, fall: Any, q: Tensor, heads: int) -> tuple[Any, Any]:
    """The backend's `segment_states` and `outputs`, the latter bound to the decays."""
    from hone.ops.scan import triton_kernels as portable

    known: dict[str, Any] = {"fall": fall}
    outputs = portable.outputs
    if backend == "gluon":
        from hone.ops.scan import gluon_outputs as hopper

        known = {"known": hopper.chunk_decays(fall, q.shape[0], heads, q.shape[1], q.device)}
        outputs = hopper.outputs
    return portable.segment_states, lambda *given, **options: outputs(*given, **known, **options)


def _plan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> tuple[Any, int]:
    """(tiling, heads) of a scan: equal in forward, backward and under fake tensors."""
    from hone.ops.scan.triton_kernels import tiling

    heads = max(q.shape[2], k.shape[2], v.shape[2])
    num_sms = locate(q.device).num_sms or 132
    return tiling(q.shape[0], heads, q.shape[1], q.shape[-1], v.shape[-1], num_sms), heads


def _addressable(x: Tensor) -> Tensor:
    """x, copied if a descriptor cannot address it: last axis contiguous, every stride a positive multiple of 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    fits = x.stride(-1) == 1 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()
