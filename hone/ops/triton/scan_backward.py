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
    starts: Tensor,
    d_out: Tensor,
    d_final: Tensor | None,
    *,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv [B, S, heads, ...], gradient of the state at the start [B, H, Dk, Dv], q.dq - k.dk [B, H, S] or None).

    `starts` [B, H, segments, Dk, Dv] as the forward left them; `d_final` the gradient of the final state.
    """
    # Every kernel multiplies by `scale`, but what comes from the final state must not be: divided beforehand.
    late = None if d_final is None else d_final / scale
    ends, d_first = segment_states(q, d_out, fall, heads, plan, late, reverse=True)
    dq, of_q = outputs(d_out, v, k, fall, heads, scale, plan, starts.transpose(-1, -2), dots_with=q if decays else None)
    dv, _ = outputs(k, q, d_out, fall, heads, scale, plan, ends, reverse=True)
    dk, of_k = outputs(
        v, d_out, q, fall, heads, scale, plan, ends.transpose(-1, -2), reverse=True, dots_with=k if decays else None
    )
    changes = of_q - of_k if of_q is not None and of_k is not None else None
    return dq, dk, dv, d_first * scale, changes


def decay_gradient(changes: Tensor, final: Tensor, d_final: Tensor | None, reset: Tensor | None) -> Tensor:
    """Gradient of the log decays [B, S, H] from `changes` = q.dq - k.dk [B, H, S] float32: sums over what comes after.

    A document's changes add up to nothing, so sums may run on across documents; a decay that a reset undoes has none.
    """
    if d_final is not None:
        changes = changes.clone()
        changes[..., -1] += (final * d_final).sum((-2, -1))
    sums = changes.flip(-1).cumsum(-1).flip(-1).transpose(1, 2)
    return sums if reset is None else torch.where(reset[..., None], 0.0, sums)
