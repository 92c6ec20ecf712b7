"""Inputs of 8-bit products as codes and scales, on any device: `input_codes`.

Legend: M rows of x, K input features, G groups of columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of

KINDS: dict[str, tuple[torch.dtype, float, float, float]] = {
    "fp8": (torch.float8_e4m3fn, -448.0, 448.0, 448.0),
    "int8": (torch.int8, -128.0, 127.0, 127.5),
}
"""Dtype, least and largest code, and the number that the largest magnitude becomes, as in compressed-tensors."""


def input_codes(
    x: Tensor,
    kind: Literal["fp8", "int8"],
    *,
    group_size: int | None = None,
    scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] as codes [M, K], float8_e4m3fn or int8, and float32 scales [M], or [M, K / group_size]; x is about their product.

    A scale is the largest magnitude of a row (or of its group) over 448 or 127.5, and 1 for zeros; `scale` float32 [1] fixes
    that of all. On a GPU one kernel, which a CUDA graph can hold. Raises SpecError for shapes and kinds that do not fit.
    """
    if kind not in KINDS:
        raise SpecError(f"kind is {kind!r}", fix=f"use one of {', '.join(KINDS)}")
    if x.dim() != 2 or not x.shape[1] or (group_size is not None and (group_size < 1 or x.shape[1] % group_size)):
        raise SpecError(
            f"x {tuple(x.shape)} has no rows in groups of {group_size}",
            fix="flatten x to [M, K], and give a group_size that divides K, or None",
        )
    if scale is not None and (scale.numel() != 1 or group_size is not None):
        raise SpecError(
            f"scale {tuple(scale.shape)} is not one number for all of x", fix="give scale [1] without group_size"
        )
    dtype, low, high, span = KINDS[kind]
    width = group_size or x.shape[1]
    if backend_of("input_codes", x.device, backend, dtype=x.dtype) == "triton":
        fixed = None if scale is None else scale.float()
        codes, scales = _codes_op(x if x.stride(1) == 1 else x.contiguous(), fixed, kind, width)
    else:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).view(len(x), -1, width)
        if scale is None:
            found = wide.abs().amax(-1) / span
            found = torch.where(found > 0, found, 1.0)
        else:
            found = scale.to(wide.dtype).expand(wide.shape[:2])
        steps = (wide / found[..., None]).clamp_(low, high)
        codes = (steps if kind == "fp8" else steps.round_()).to(dtype).view(x.shape)
        scales = found.float().contiguous()
    return codes, scales if group_size is not None else scales.view(-1)


@torch.library.custom_op("hone::input_codes", mutates_args=())
def _codes_op(x: Tensor, scale: Tensor | None, kind: str, width: int) -> tuple[Tensor, Tensor]:
    from hone.ops.linear.triton_codes import launch_codes

    dtype, low, high, span = KINDS[kind]
    return launch_codes(x, dtype, width, (low, high, span), scale)


@_codes_op.register_fake
def _(x: Tensor, scale: Tensor | None, kind: str, width: int) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(x.shape[0], x.shape[1] // width, dtype=torch.float32)
    return torch.empty_like(x, dtype=KINDS[kind][0], memory_format=torch.contiguous_format), scales
