"""Gradients of a scan: the forward's own kernels, with the roles of the tensors exchanged and time turned round.

With c the cumulative log decay and w = exp(c_s - c_t) the weight of token t at s >= t (scale apart):

    dq_s = sum_{t <= s} w (do_s . v_t) k_t      rows do, keys v, values k, states S^T, in time's order
    dv_t = sum_{s >= t} w (k_t . q_s) do_s      rows k, keys q, values do, states dS, backwards
    dk_t = sum_{s >= t} w (v_t . do_s) q_s      rows v, keys do, values q, states dS^T, backwards
    d log decay_t = sum_{s >= t} (q_s . dq_s - k_s . dk_s), plus dS_T . S_T of the final state (arXiv:2312.06635, 4.3)

The states S come from the forward pass; those of dS need one more pass over q and do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.triton.scan import Fall, Tiling, outputs, segment_states


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fall: Fall,
    heads: int,
    scale: float,
    plan: Tiling,
    starts: Tensor | None,
    final: Tensor,
    d_out: Tensor,
    d_final: Tensor | None,
    *,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv [B, S, heads, ...], gradient of the state at the start [B, H, Dk, Dv], of the decays [B, S, H] or None).

    `starts` [B, H, segments, Dk, Dv] as the forward left them; `d_final` the gradient of the final state.
    """
    # Every kernel multiplies by `scale`, but what comes from the final state must not be: divided beforehand.
    late = None if d_final is None else d_final / scale
    ends = segment_states(q, d_out, fall, heads, plan, late, reverse=True)
    d_first = ends.new_empty((*ends.shape[:2], *ends.shape[3:]))
    turned = None if starts is None else starts.transpose(-1, -2)
    dq, of_q = outputs(d_out, v, k, fall, heads, scale, plan, turned, dots_with=q if decays else None)
    dv, _ = outputs(k, q, d_out, fall, heads, scale, plan, ends, reverse=True, final=d_first)
    dk, of_k = outputs(
        v, d_out, q, fall, heads, scale, plan, ends.transpose(-1, -2), reverse=True, dots_with=k if decays else None
    )
    d_decay = None
    if of_q is not None and of_k is not None:
        later = torch.zeros_like(ends[..., 0, 0])
        if plan.segments > 1 and starts is not None:
            later[..., :-1] = (starts[:, :, 1:] * ends[:, :, :-1]).sum((-2, -1)) * scale
        if d_final is not None:
            later[..., -1] = (final * d_final).sum((-2, -1))
        d_decay = _decay_gradient(of_q - of_k, later, plan.segment_tokens(q.shape[1]), fall.reset)
    return dq, dk, dv, d_first * scale, d_decay


def _decay_gradient(changes: Tensor, later: Tensor, tokens: int, reset: Tensor | None) -> Tensor:
    """Gradient of the log decays [B, S, H] from `changes` = q.dq - k.dk [B, H, S] float32: sums over what comes after.

    Sums run to the end of a segment of `tokens` tokens only; what comes from later ones is `later` [B, H, segments], the
    inner product of the state there and its gradient: few terms, few rounding errors. A document's changes add up to
    nothing, so sums may run on across documents; a decay that a reset undoes has none.
    """
    seq_len = changes.shape[-1]
    segments = later.shape[-1]
    parts = F.pad(changes, (0, segments * tokens - seq_len)).unflatten(-1, (segments, tokens))
    sums = parts.flip(-1).cumsum(-1).flip(-1) + later[..., None]
    sums = sums.flatten(-2)[..., :seq_len].transpose(1, 2)
    return sums.contiguous() if reset is None else torch.where(reset[..., None], 0.0, sums)
