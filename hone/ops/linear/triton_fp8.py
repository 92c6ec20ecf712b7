"""Products of fp8 (or int8) codes with one scale per row or per block of 128: out^T = W x^T, sums promoted every 128 of K.

Hopper's tensor cores accumulate fp8 products with about 14 bits; a separate sum for every 128 columns, added in float32,
limits the error (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

Shapes: x e4m3 [M, K] with scales [M] or [M, K/128]; weight e4m3 [N, K] with scales [N] or [N/128, K/128]; out [M, N].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, previous_kernel_done, start_next_kernel
from hone.ops.linear.shapes import Fp8Shape
from hone.ops.linear.triton_skinny import parts_of, sum_parts


@triton.jit(do_not_specialize=["M"])
def fp8_product(
    x, x_scales, weight, weight_scales, bias, out, M, N, K, stride_x, stride_xs, stride_weight, stride_ws, stride_out,
    stride_part,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKWISE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """One tile of out^T over one part of K; K in steps of 128. With parts of K, `out` is float32 [S, M, N].

    INTEGER: codes are int8, whose sums are exact.
    """
    part = tl.program_id(1)
    first_row = tl.program_id(0) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    columns = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, 128)
    blocks = tl.cdiv(tl.cdiv(K, 128), tl.num_programs(1))
    first = part * blocks * 128
    last = tl.minimum(first + blocks * 128, K)
    weight_rows = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_weight
    x_columns = x + columns.to(tl.int64)[None, :] * stride_x
    mine = columns < M
    previous_kernel_done(EARLY)
    SUMS: tl.constexpr = tl.int32 if INTEGER else tl.float32
    EMPTY: tl.constexpr = 0 if INTEGER else 0.0
    total = tl.zeros([BLOCK_N, BLOCK_M], SUMS)
    for k in tl.range(first, last, 128, num_stages=STAGES):
        inside = k + ks < last
        w = tl.load(weight_rows + (k + ks)[None, :], mask=inside[None, :], other=EMPTY)
        xs = tl.load(x_columns + (k + ks)[:, None], mask=mine[None, :] & inside[:, None], other=EMPTY)
        piece = tl.dot(w, xs, out_dtype=SUMS)
        if BLOCKWISE:  # BLOCK_N divides 128: a tile lies in one block of rows
            scale = tl.load(weight_scales + (first_row // 128) * stride_ws + k // 128)
            piece *= (tl.load(x_scales + columns * stride_xs + k // 128, mask=mine, other=0.0) * scale)[None, :]
        total += piece
    start_next_kernel(EARLY)
    total = total.to(tl.float32)
    if not BLOCKWISE:
        total *= tl.load(x_scales + columns, mask=mine, other=0.0)[None, :]
        total *= tl.load(weight_scales + rows, mask=rows < N, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    places = out + part.to(tl.int64) * stride_part + columns.to(tl.int64)[:, None] * stride_out + rows[None, :]
    tl.store(places, tl.trans(total).to(out.dtype.element_ty), mask=mine[:, None] & (rows[None, :] < N))


def fp8_rows_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, dtype: torch.dtype,
    shape: Fp8Shape,
) -> Tensor:  # fmt: skip
    """x [M, K] times weight [N, K] transposed with their scales (see the file), plus bias [N]: [M, N] in `dtype`."""
    (rows, columns), features = x.shape, len(weight)
    out = torch.empty(rows, features, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    blockwise, split = x_scales.dim() == 2, shape.parts > 1
    early = split and early_launch(x.device)
    parts = parts_of(rows, features, shape.parts, out)
    fp8_product[(triton.cdiv(features, shape.block_n), shape.parts, triton.cdiv(rows, shape.block_m))](
        x, x_scales.contiguous(), weight, weight_scales.contiguous(), bias, parts, rows, features, columns,
        x.stride(0), x_scales.shape[-1], weight.stride(0), weight_scales.shape[-1], features, rows * features,
        BLOCK_N=shape.block_n, BLOCK_M=shape.block_m, BLOCKWISE=blockwise, HAS_BIAS=bias is not None and not split,
        EARLY=early, STAGES=shape.stages, INTEGER=x.dtype == torch.int8, num_warps=shape.warps, num_stages=shape.stages,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return sum_parts(parts, bias, out) if split else out
