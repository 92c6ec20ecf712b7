"""Linear attention with decays in plain torch: token by token (the definition), and in chunks of products (the CPU path)."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.ops.scan.checks import checked_heads

CHUNK = 64
"""Tokens per chunk in plain torch."""

CHANNEL_CHUNK = 16
"""The same for decays per channel, whose weights [C, C, Dk] are stored for one chunk at a time."""


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
    heads = checked_heads(q, k, v, decay, state, reset)
    q, k, v, now = _widened(q, k, v, state, heads)
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

    Every weight is the exponential of a number <= 0, within a chunk exp(c_s - c_t), s >= t, of cumulative log decays c, so
    strong decays cannot overflow.
    """
    heads = checked_heads(q, k, v, decay, state, reset)
    dtype = v.dtype
    q, k, v, now = _widened(q, k, v, state, heads)
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


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`hone.ops.scan_delta` in chunks of 64 tokens: (out in v's dtype, final state float32 or float64).

    In each chunk the solution of a triangular system is each token's change of the state (the WY form); the rest is a chunk
    of `scan`.
    """
    heads = checked_heads(q, k, v, decay, state, reset)
    dtype = v.dtype
    q, k, v, now = _widened(q, k, v, state, heads)
    beta = beta.to(q.dtype)[..., None]
    out = []
    for first in range(0, q.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        fall = None if decay is None else _fallen(decay, part, q)
        begins = None if reset is None else reset[:, part]
        entering, _, _, drop = _pair_weights(k[:, part], fall, begins)
        missing = v[:, part] - torch.einsum("bshd,bhdv->bshv", entering * k[:, part], now)
        # added_s + beta_s sum_{t < s} (k_s . k_t) drop_st added_t = beta_s missing_s; the diagonal is not read.
        alike = torch.einsum("bshd,bthd,bsth->bhst", beta[:, part] * k[:, part], k[:, part], drop[..., 0])
        wanted = (beta[:, part] * missing).transpose(1, 2)
        added = torch.linalg.solve_triangular(alike, wanted, upper=False, unitriangular=True)
        mixed, now = _one_chunk(q[:, part] * scale, k[:, part], added.transpose(1, 2), fall, begins, now)
        out.append(mixed)
    return torch.cat(out, 1).to(dtype), now


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, fall: Tensor | None, begins: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs [B, C, H, Dv], state after the chunk); `fall` [B or 1, C, H, 1 or Dk] is the log decay since its start."""
    entering, leaving, through, drop = _pair_weights(q, fall, begins)
    if drop.shape[-1] == 1:
        scores = torch.einsum("bshd,bthd->bsth", q, k) * drop[..., 0]
    else:
        scores = torch.einsum("bshd,bthd,bsthd->bsth", q, k, drop)
    out = torch.einsum("bsth,bthv->bshv", scores, v) + torch.einsum("bshd,bhdv->bshv", entering * q, state)
    return out, through * state + torch.einsum("bthd,bthv->bhdv", leaving * k, v)


def _pair_weights(like: Tensor, fall: Tensor | None, begins: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of a chunk: of the incoming state in a token, of a token in the outgoing state (both [., C, ., .]), of the
    incoming state in the outgoing one, of a column's token in a row's [., row, column, H, .]; the last axis 1 or Dk."""
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


def _widened(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All in float32 or float64, with shared heads repeated, and a state of zeros instead of None."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide).repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    if state is None:
        state = q.new_zeros(q.shape[0], heads, q.shape[-1], v.shape[-1])
    return q, k, v, state.to(wide)
