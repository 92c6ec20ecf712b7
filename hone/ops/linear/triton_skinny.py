"""Products of a few rows with a large weight: out^T = W x^T, bound by reading the weight once.

Output features are the tensor cores' M and the few rows of x their N, so that no product is wasted on padding ("swap-AB").
K may be split over blocks; a second kernel then adds their float32 parts in a fixed order. Both kernels use programmatic
dependent launch: a kernel prefetches its first weights before the previous one has ended.

Shapes: x [M, K], weight [N, K], out [M, N]; S parts of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, prefetch, previous_kernel_done, start_next_kernel
from hone.ops.linear.shapes import SkinnyShape


@triton.jit
def sum_of_columns(
    x_columns, weight_rows, mine, first, last,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M]: the products of weight rows and rows of x (those that are `mine`) over columns first ... last."""
    ks = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if WHOLE_K:
            w = tl.load(weight_rows + (k + ks)[None, :])
            xs = tl.load(x_columns + (k + ks)[:, None], mask=mine, other=0.0)
        else:
            inside = k + ks < last
            w = tl.load(weight_rows + (k + ks)[None, :], mask=inside[None, :], other=0.0)
            xs = tl.load(x_columns + (k + ks)[:, None], mask=mine & inside[:, None], other=0.0)
        total = tl.dot(w, xs, total)
    return total


@triton.jit(do_not_specialize=["M"])
def skinny(
    x, weight, bias, out, M, N, K, stride_x, stride_weight, stride_out, stride_part,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, SOON: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of out^T: rows [BLOCK_N] of the weight by all M rows of x, over one part of K.

    With parts of K, `out` is float32 [S, M, N] and receives each part's sum without the bias.
    """
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))
    first = part * blocks * BLOCK_K
    last = tl.minimum(first + blocks * BLOCK_K, K)
    weight_rows = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_weight
    if EARLY and AHEAD > 0:
        lines = first + tl.arange(0, AHEAD) * 64
        prefetch(weight_rows + tl.minimum(lines, K - 1)[None, :])
    previous_kernel_done(EARLY)
    if SOON:
        start_next_kernel(EARLY)
    total = sum_of_columns(
        x + columns[None, :] * stride_x,
        weight_rows,
        columns[None, :] < M,
        first,
        last,
        BLOCK_N,
        BLOCK_M,
        BLOCK_K,
        WHOLE_K,
        STAGES,
    )
    if not SOON:
        start_next_kernel(EARLY)
    places = out + part.to(tl.int64) * stride_part + columns[:, None] * stride_out + rows[None, :]
    result = tl.trans(total)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=(columns[:, None] < M) & (rows[None, :] < N))


@triton.jit
def add_parts(
    parts, bias, out, N, stride_part, stride_out,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [M, N] = the sum of parts float32 [S, M, N] from the first to the last, plus the bias."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * stride_part + row * N + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Fills out [M, N] with the sum of parts float32 [S, M, N], in their order, plus bias [N]."""
    count, rows, columns = parts.shape
    block, early = 512, early_launch(out.device)
    add_parts[(rows, triton.cdiv(columns, block))](
        parts, bias, out, columns, parts.stride(0), out.stride(0), PARTS=count, BLOCK=block,
        HAS_BIAS=bias is not None, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def parts_of(rows: int, columns: int, parts: int, out: Tensor) -> Tensor:
    """The output of the parts of K: `out` itself for one part, else a new float32 [S, M, N]."""
    return out if parts == 1 else out.new_empty(parts, rows, columns, dtype=torch.float32)


def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None, shape: SkinnyShape) -> Tensor:
    """x [M, K] (M <= shape.block_m) times weight [N, K] transposed, plus bias [N]: [M, N]. Rows are 16-byte aligned."""
    (rows, columns), features = x.shape, len(weight)
    out = x.new_empty(rows, features)
    if not out.numel():
        return out
    parts = parts_of(rows, features, shape.parts, out)
    split, early = shape.parts > 1, early_launch(x.device) and shape.early
    skinny[(triton.cdiv(features, shape.block_n), shape.parts)](
        x, weight, bias, parts, rows, features, columns, x.stride(0), weight.stride(0), features, rows * features,
        BLOCK_N=shape.block_n, BLOCK_M=shape.block_m, BLOCK_K=shape.block_k, WHOLE_K=columns % shape.block_k == 0,
        HAS_BIAS=bias is not None and not split, EARLY=early, AHEAD=4 if early and split else 0, SOON=split, STAGES=shape.stages,
        num_warps=shape.warps, num_stages=shape.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return sum_parts(parts, bias, out) if split else out
