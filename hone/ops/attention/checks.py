"""What attention refuses: shapes, dtypes, devices, scales and caps that do not fit together."""

from __future__ import annotations

from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.attention.masks import Mask


def scale_of(q: Tensor, scale: float | None, softcap: float | None) -> float:
    """`scale`, or that of the head width. Raises SpecError when it or `softcap` is not positive."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not scale > 0:
        raise SpecError(
            f"scale is positive, not {scale}", fix="leave scale out for head_dim ** -0.5, or give one above 0"
        )
    if softcap is not None and not softcap > 0:
        raise SpecError(f"softcap is positive, not {softcap}", fix="leave softcap out for no cap, or give one above 0")
    return scale


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None) -> None:
    """Raises SpecError for arguments of `attend` that do not fit together, naming the one."""
    for name, made in (("q", q), ("k", k), ("v", v)):
        if made.dim() != 4:
            raise SpecError(
                f"{name} is [batch, sequence, heads, head_dim], not of shape {list(made.shape)}",
                fix=f"give {name} four axes: unsqueeze(0) adds the batch, unflatten(-1, (heads, head_dim)) the heads",
            )
        if made.dtype != q.dtype or not made.is_floating_point():
            raise SpecError(
                f"q, k and v share one floating dtype: q has {q.dtype}, {name} has {made.dtype}",
                fix="convert all three to one of bfloat16, float16, float32 with .to(dtype)",
            )
        if made.device != q.device:
            raise SpecError(
                f"q, k and v share one device: q is on {q.device}, {name} on {made.device}",
                fix=f"move it there: {name}.to(q.device)",
            )
        if made.shape[2] == 0 or made.shape[3] == 0:
            raise SpecError(
                f"{name} {list(made.shape)} has no heads, or heads of width 0",
                fix=f"give {name} at least one head of at least one number",
            )
    if k.shape[:3] != v.shape[:3]:
        raise SpecError(
            f"k {list(k.shape)} and v {list(v.shape)} differ in more than the head width",
            fix="give k [B, Sk, KV, Dh] and v [B, Sk, KV, Dv]: a value for every key",
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise SpecError(
            f"q {list(q.shape)} and k {list(k.shape)} differ in batch or head width",
            fix="give q [B, Sq, H, Dh] and k [B, Sk, KV, Dh] of one B and one Dh",
        )
    if q.shape[2] % k.shape[2]:
        raise SpecError(
            f"q's {q.shape[2]} heads are no multiple of k's {k.shape[2]}",
            fix="give k and v a number of heads that divides q's: consecutive query heads share a key head",
        )
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise SpecError(
            f"sinks is one number a query head, [{q.shape[2]}], not of shape {list(sinks.shape)}",
            fix=f"give a vector of {q.shape[2]} numbers, or None",
        )
    mask.check_sizes(q.shape[1], k.shape[1])
    for name, made in (("q_data", mask.q_data), ("k_data", mask.k_data), ("table", mask.table)):
        if made is None:
            continue
        if made.shape[0] not in (1, q.shape[0]) or made.shape[1] not in (1, q.shape[2]):
            raise SpecError(
                f"the mask's {name} is for {made.shape[0]} sequences and {made.shape[1]} heads (1: for all), "
                f"q has {q.shape[0]} and {q.shape[2]}",
                fix="make the mask for as many sequences and heads as q has, or for 1, which serves all",
            )
        if made.device != q.device:
            raise SpecError(
                f"the mask's {name} is on {made.device}, q on {q.device}",
                fix=f"build the mask from tensors on {q.device}",
            )
