"""fp8 codes, their power-of-two scales and their product in plain torch: the definition, and the path of CPUs.

Products are of decoded float32 numbers, which codes and scales give exactly: they do not depend on what a CPU has for
small formats.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.moe import reference as moe

TOP_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The exponent of the largest number, which is 1.75 times two to it in both formats: 448 and 57,344."""

_INFINITE = 0x7F800000
_NAN = 0x7FC00000
_THREE_QUARTERS = 0x600000
"""The bits of 1.75's fraction."""


def maxima(x: Tensor, tensorwise: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of the rows and of the columns of x [..., M, K], as bits of float32: int32 [..., M] and [..., K], or both [1].

    Bits of magnitudes are in the order of the magnitudes, with NaN above all.
    """
    bits = x.detach().float().view(torch.int32) & 0x7FFFFFFF
    if tensorwise:
        return bits.amax().view(1), bits.amax().view(1)
    if not bits.numel():  # an expert-parallel rank without rows
        return bits.new_zeros(bits.shape[:-1]), bits.new_zeros(*bits.shape[:-2], bits.shape[-1])
    return bits.amax(-1), bits.amax(-2)


def scales_of(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scales, 1 / scales), float32, of numbers whose largest magnitude has the bits `largest`.

    A scale is the least power of two by which the division leaves no more than the largest number of `dtype`, at least 2^-126; NaN
    where a number is not finite.
    """
    exponent = (largest >> 23) - TOP_EXPONENT[dtype] + ((largest & 0x7FFFFF) > _THREE_QUARTERS).int()
    exponent = exponent.clamp(1, 253)
    scales = torch.where(largest >= _INFINITE, torch.full_like(largest, _NAN), exponent << 23)
    return scales.view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def codes_of(x: Tensor, largest: Tensor, dtype: torch.dtype, *, columns: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of x [..., M, K] by its rows: [..., M, K] and [..., M]; with `columns` of its transpose: [..., K, M] and [..., K].

    `largest` are those of `maxima`; one of a whole tensor gives scales [1]. Rounded to nearest, half to even.
    """
    scales, inverse = scales_of(largest, dtype)
    wide = x.detach().float()
    wide = wide.transpose(-1, -2) if columns else wide
    return (wide * inverse[..., None]).to(dtype).contiguous(), scales


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Codes a [M, K] times codes b [N, K] transposed, decoded, plus bias [N]: [M, N] in `dtype`, sums in float32."""
    out = F.linear(a.float() * a_scales[:, None], b.float() * b_scales[:, None])
    return (out if bias is None else out + bias.float()).to(dtype)


def grouped_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Codes a [T, K] of rows sorted by expert times codes b [E, N, K] of their expert transposed, decoded: [T, N] in `dtype`."""
    rows, weight = a.float() * a_scales[:, None], b.float() * b_scales[..., None]
    return moe.grouped_linear(rows, weight, ends).to(dtype)


def grouped_sums(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes a [N, T] times codes b [K, T] transposed, decoded, each expert's tokens on their own: [E, N, K] in `dtype`."""
    return moe.grouped_sums((a.float() * a_scales[:, None]).t(), (b.float() * b_scales[:, None]).t(), ends).to(dtype)
