"""Weights of 4-bit codes as numbers: the public function and its GPU op.

Shapes: N output features, K input features, G blocks of a row that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.nf4 import reference
from hone.ops.nf4.reference import Nested


def dequantize_nf4(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    *,
    number: str = "nf4",
    nested: Nested | None = None,
    backend: str | None = None,
) -> Tensor:
    """The weights [N, K] in `dtype` of codes uint8 [N, K / 2], two to a byte, the first in the high nibble; arXiv:2305.14314.

    A code is an index into the 16 values of `number`, 'nf4' or 'fp4', which its block's scale multiplies, in float32.
    scales are float32 [N, G], or with `nested` uint8 [N, G]: both levels are then read in one pass. No gradient.
    Raises SpecError for shapes and dtypes that do not fit.
    """
    rows, columns = codes.shape[0], 2 * codes.shape[-1]
    wanted = torch.float32 if nested is None else torch.uint8
    fits = codes.dim() == 2 and scales.dim() == 2 and len(scales) == rows and scales.shape[1] > 0
    if not fits or columns % (2 * scales.shape[1]) or codes.dtype != torch.uint8 or scales.dtype != wanted:
        raise SpecError(
            f"codes {codes.dtype} {tuple(codes.shape)} and scales {scales.dtype} {tuple(scales.shape)} do not fit",
            fix=f"give codes torch.uint8 [N, K / 2] and scales {wanted} [N, G], with G blocks of an even number of columns",
        )
    width = columns // scales.shape[1]
    chosen = backend_of("dequantize_nf4", codes.device, backend, dtype=dtype, width=width)
    if chosen != "triton":
        return reference.dequantize(codes, scales, number, dtype, nested)
    values, outer, offsets, first = (None, None, None, 0) if nested is None else nested
    run = _dequantize_op if torch.compiler.is_compiling() else _dequantize
    found: Tensor = run(codes, scales, number, dtype, values, outer, offsets, first)
    return found


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    number: str,
    dtype: torch.dtype,
    values: Tensor | None,
    outer: Tensor | None,
    offsets: Tensor | None,
    first: int,
) -> Tensor:
    from hone.ops.nf4.triton_kernels import launch_dequantize

    out = _dequantize_fake(codes, scales, number, dtype, values, outer, offsets, first)
    launch_dequantize(codes.contiguous(), scales.contiguous(), reference.table(number, codes.device), out, values, outer, offsets, first)  # fmt: skip
    return out


_dequantize_op = torch.library.custom_op("hone::dequantize_nf4", _dequantize, mutates_args=())


@_dequantize_op.register_fake
def _dequantize_fake(
    codes: Tensor,
    scales: Tensor,
    number: str,
    dtype: torch.dtype,
    values: Tensor | None,
    outer: Tensor | None,
    offsets: Tensor | None,
    first: int,
) -> Tensor:
    return torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
