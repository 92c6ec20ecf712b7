"""Checks of the arguments of a scan."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError


def checked_heads(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, reset: Tensor | None
) -> int:
    """The number of heads; raises SpecError naming the argument that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[:2] != q.shape[:2]:
            said = f"scan: {name} must be [B, S, H, D] like q {tuple(q.shape)}, is {tuple(x.shape)}"
            raise SpecError(said, fix="give q, k and v with equal B and S, heads in axis 2")
        if not min(x.shape[2:]):
            said = f"scan: {name} {tuple(x.shape)} has no heads or heads of width 0"
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
        raise SpecError(f"scan: k has head dimension {k.shape[-1]}, q {dim_k}", fix="give q and k heads of equal width")
    shapes = {1: (heads,), 3: (batch, seq_len, heads), 4: (batch, seq_len, heads, dim_k)}
    if decay is not None and decay.shape != shapes.get(decay.dim()):
        said = f"scan: decay {tuple(decay.shape)} is none of {', '.join(map(str, shapes.values()))}"
        raise SpecError(said, fix="give one logarithm per head, token or channel in one of these shapes, or None")
    if state is not None and state.shape != (batch, heads, dim_k, v.shape[-1]):
        said = f"scan: state {tuple(state.shape)} is not {(batch, heads, dim_k, v.shape[-1])}"
        raise SpecError(said, fix="give the state of a call with return_state=True and these sizes, or None")
    if reset is not None and (reset.shape != (batch, seq_len) or reset.dtype != torch.bool):
        said = f"scan: reset must be bool {(batch, seq_len)}, is {reset.dtype} {tuple(reset.shape)}"
        raise SpecError(said, fix="give one bool per token, True where a document starts: reset.bool()")
    return heads
