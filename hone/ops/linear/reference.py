"""Products with weights of integer and fp8 codes in plain torch: the kernels' reference, and the CPU path.

Legend: M rows of x, N output features, K input features, G groups of columns that share a scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops import formats

FP8_BLOCK = 128
"""Columns of x, and rows and columns of the weight, that share a scale in the blockwise recipe."""


def quantized_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times codes int8 [N, K] with scales [N, G], plus bias [N]: [..., N] in x's dtype; differentiable in x."""
    if scales.shape[1] == 1:  # N multiplications per row instead of N x K, and no rounding of weights
        out = F.linear(x, codes.to(x.dtype)) * scales.to(x.dtype).view(-1)
    else:
        out = F.linear(x, formats.dequantize(codes, scales, x.dtype))
    return out if bias is None else out + bias.to(out.dtype)


def fp8_linear(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`hone.ops.fp8_linear` with sums in float32, or in float64 for `dtype` float64."""
    wide = torch.promote_types(dtype, torch.float32)
    out = fp8_values(x, x_scales, wide) @ fp8_values(weight, weight_scales, wide).T
    return (out if bias is None else out + bias.to(wide)).to(dtype)


def fp8_values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [M, K] of e4m3 codes and scales of `fp8_codes`; the shape of the scales tells the kind."""
    if scales.dim() == 1:
        return codes.to(dtype) * scales.to(dtype).unsqueeze(1)
    high = 1 if len(scales) == len(codes) else FP8_BLOCK
    expanded = scales.repeat_interleave(high, 0)[: len(codes)].repeat_interleave(FP8_BLOCK, 1)
    return codes.to(dtype) * expanded.to(dtype)
