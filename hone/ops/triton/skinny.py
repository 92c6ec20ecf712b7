"""Products of a few rows with a large weight: out^T = W x^T, the weight streamed once at the memory's rate.

The long side (output features) takes the tensor cores' M and the few rows of x their N, so that no product is wasted on
padding ("swap-AB"). K may be split over blocks; their float32 parts are then added in a fixed order by a second kernel.
Both kernels use programmatic dependent launch: a kernel asks for its first weights before the one ahead of it has ended.

Shapes: x [M, K], weight [N, K], out [M, N]; S parts of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hone.ops.compat import INTERPRETED

_ON_GPU = tl.constexpr(not INTERPRETED)


@triton.jit
def after_previous_kernel(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits until the previous one's writes are visible (and its reads are done)."""
    if EARLY and _ON_GPU:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def prefetch(pointers):
    """Asks the L2 cache for the 128 bytes around each pointer. Nothing is read, so this may run ahead of any wait."""
    if _ON_GPU:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["M"])
def skinny(
    x, weight, bias, out, M, N, K, stride_x, stride_weight, stride_out, stride_part,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of out^T: rows [BLOCK_N] of the weight by all M rows of x, over one part of K.

    With PARTS > 1, `out` is float32 [S, M, N] and takes the part's sum without the bias.
    """
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    blocks = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS)
    first = part * blocks * BLOCK_K
    last = tl.minimum(first + blocks * BLOCK_K, K)
    weight_rows = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * stride_weight
    if EARLY and AHEAD > 0:
        lines = first + tl.arange(0, AHEAD) * 64
        prefetch(weight_rows + tl.minimum(lines, K - 1)[None, :])
    after_previous_kernel(EARLY)
    x_columns = x + columns[None, :] * stride_x
    mine = columns[None, :] < M
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
    places = out + part.to(tl.int64) * stride_part + columns[:, None] * stride_out + rows[None, :]
    result = tl.trans(total)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=(columns[:, None] < M) & (rows[None, :] < N))


@triton.jit
def add_parts(
    parts, bias, out, N, stride_part, stride_parts_row, stride_out,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [M, N] = the sum of parts float32 [S, M, N] from the first to the last, plus the bias."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    after_previous_kernel(EARLY)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * stride_part + row * stride_parts_row + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + columns, total.to(out.dtype.element_ty), mask=inside)
