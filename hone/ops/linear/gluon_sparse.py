"""Products of a few rows with a 2:4 sparse weight, unpacked in registers: out^T = W x^T, nine sixteenths of the dense bytes.

A group is four neighbouring columns of a row, of which two are kept. The kept pairs and four bits a group become one A operand
for each place in a group, multiplied with every fourth column of x: no weight ever changes its thread. Hopper's sparse tensor
cores would save products, of which few rows have few, and libraries read the weight at a fifth of the memory's rate for them.
One warp loads by the tensor memory accelerator, several stages ahead, as in `gluon_quantized`.

Shapes: x [4, M, K/4] (column 4g + p of row m at [p, m, g]), pairs int32 [N, K/4], masks uint8 [N, K/8], out [M, N].
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hone.ops.compat import tma_load, warpgroup_barrier
from hone.ops.linear.gluon_codes import previous_kernel_done, start_next_kernel
from hone.ops.linear.shapes import SparseShape
from hone.ops.linear.triton_skinny import parts_of, sum_parts

GROUPS = gl.constexpr(32)
"""Groups of one product: the bytes of a row's masks, of which the low halves belong to 32 groups and the high ones to the next 32."""


@gluon.constexpr_function
def _assembly(half):
    """PTX for four groups, two a register: the weights at places 0 to 3 ($0-$7) of pairs ($8-$11) and masks ($12).

    A bit of the mask is widened to the 16 bits of a weight by `prmt`, which can repeat the sign of a byte. `half`: which of a
    byte's two masks, the low or the high four bits.
    """
    text = "{ .reg .b32 f, s, m, t, k0, k1, k2, k3; "
    for at in range(2):
        a, b = 8 + 2 * at, 9 + 2 * at
        text += f"prmt.b32 f, ${a}, ${b}, 0x5410; prmt.b32 s, ${a}, ${b}, 0x7632; "  # first and second values of both groups
        text += f"prmt.b32 m, $12, 0, {'0x3322' if at else '0x1100'}; "
        for place in range(4):
            text += f"shl.b32 t, m, {7 - 4 * half - place}; prmt.b32 k{place}, t, 0, 0xba98; "
        text += f"and.b32 ${at}, f, k0; and.b32 ${6 + at}, s, k3; "
        text += f"lop3.b32 t, k0, s, f, 0xca; and.b32 ${2 + at}, t, k1; "  # after a kept place 0 comes the second value
        text += f"lop3.b32 t, k3, f, s, 0xca; and.b32 ${4 + at}, t, k2; "  # before a kept place 3 comes the first one
    return text + "}"


@gluon.jit
def _weights(pairs_s, masks_s, slot, HALF: gl.constexpr, DTYPE: gl.constexpr, operand: gl.constexpr):
    """Half a stage as four A operands [BLOCK_N, GROUPS], one for each place in a group."""
    ASM: gl.constexpr = _assembly(HALF)
    pairs = pairs_s.index(2 * slot + HALF).load(operand)
    masks = masks_s.index(slot).load(operand)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r", [pairs, masks], is_pure=True, pack=4,
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16),
    )  # fmt: skip
    return (
        w0.to(DTYPE, bitcast=True),
        w1.to(DTYPE, bitcast=True),
        w2.to(DTYPE, bitcast=True),
        w3.to(DTYPE, bitcast=True),
    )


@gluon.jit
def _load_weights(pairs_desc, masks_desc, pairs_s, masks_s, bar, slot, row, step, BYTES: gl.constexpr):
    mbarrier.expect(bar, BYTES)
    tma_load(pairs_desc, [row, step * 2 * GROUPS], bar, pairs_s.index(2 * slot))
    tma_load(pairs_desc, [row, step * 2 * GROUPS + GROUPS], bar, pairs_s.index(2 * slot + 1))
    tma_load(masks_desc, [row, step * GROUPS], bar, masks_s.index(slot))


@gluon.jit
def _produce(
    x_desc, pairs_desc, masks_desc, x_s, pairs_s, masks_s, full, empty, row, column, first, last, EARLY: gl.constexpr
):
    """The loading warp: for each step of 2 GROUPS groups the weight's rows and x."""
    STAGES: gl.constexpr = full.type.shape[0]
    WEIGHTS: gl.constexpr = 2 * pairs_desc.block_type.nbytes + masks_desc.block_type.nbytes
    BYTES: gl.constexpr = WEIGHTS + 2 * x_desc.block_type.nbytes
    BM: gl.constexpr = x_s.type.shape[1]
    x_stages = x_s._reinterpret(x_desc.dtype, [2 * STAGES, 4, BM, GROUPS], x_desc.layout)
    if EARLY:  # weights do not depend on the previous kernel
        for s in gl.static_range(STAGES):
            if first + s < last:
                _load_weights(pairs_desc, masks_desc, pairs_s, masks_s, full.index(s), s, row, first + s, BYTES)
        previous_kernel_done()
    for step in range(first, last):
        done = step - first
        slot = done % STAGES
        bar = full.index(slot)
        if not EARLY or done >= STAGES:
            mbarrier.wait(empty.index(slot), ((done // STAGES) & 1) ^ 1)
            _load_weights(pairs_desc, masks_desc, pairs_s, masks_s, bar, slot, row, step, BYTES)
        tma_load(x_desc, [0, column, step * 2 * GROUPS], bar, x_stages.index(2 * slot))
        tma_load(x_desc, [0, column, step * 2 * GROUPS + GROUPS], bar, x_stages.index(2 * slot + 1))
    if EARLY:
        start_next_kernel()


@gluon.jit
def _consume(
    x_s, pairs_s, masks_s, full, empty, bias, out, row, column, part, steps, M, N, stride_out, stride_part,
    SYNCED: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiplies stage by stage, by mma.sync where x has few rows and by wgmma elsewhere, and stores the sums."""
    STAGES: gl.constexpr = full.type.shape[0]
    BN: gl.constexpr = pairs_s.type.shape[1]
    BM: gl.constexpr = x_s.type.shape[1]
    DTYPE: gl.constexpr = x_s.dtype
    L_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0] if SYNCED else [3, 0],
        warps_per_cta=[BN // 16, 1],
        instr_shape=[16, 8] if SYNCED else [16, BM, 16],
    )
    L_A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L_ACC, k_width=2)
    L_B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=L_ACC, k_width=2)
    acc = gl.zeros([BN, BM], gl.float32, L_ACC)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        for half in gl.static_range(2):
            w = _weights(pairs_s, masks_s, slot, half, DTYPE, L_A)
            if SYNCED:
                product = gl.zeros_like(acc)  # a sum of its own keeps chains of dependent products short
                for place in gl.static_range(4):
                    xs = x_s.index((2 * slot + half) * 4 + place).permute((1, 0)).load(L_B)
                    product = mma_v2(w[place], xs, product)
                acc += product
            else:
                for place in gl.static_range(4):
                    xs = x_s.index((2 * slot + half) * 4 + place).permute((1, 0))
                    acc = warpgroup_mma(w[place], xs, acc, is_async=True)
                acc, _a, _b, _c, _d = warpgroup_mma_wait(0, deps=[acc, w[0], w[1], w[2], w[3]])
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot))
    if EARLY:
        previous_kernel_done()
    rows = row + gl.arange(0, BN, gl.SliceLayout(1, L_ACC))
    columns = column + gl.arange(0, BM, gl.SliceLayout(0, L_ACC))
    inside = rows < N
    if HAS_BIAS:
        acc = acc + gl.load(bias + rows, mask=inside, other=0.0).to(gl.float32)[:, None]
    places = out + part.to(gl.int64) * stride_part + columns.to(gl.int64)[None, :] * stride_out + rows[:, None]
    gl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < M))


@gluon.jit(do_not_specialize=["M"])
def sparse_stream(
    x_desc, pairs_desc, masks_desc, bias, out, M, N, K, stride_out, stride_part,
    STAGES: gl.constexpr, SYNCED: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One tile of out^T over one part of K, which is a multiple of 8 GROUPS. With parts of K, `out` is float32 [S, M, N]."""
    BN: gl.constexpr = pairs_desc.block_type.shape[0]
    BM: gl.constexpr = x_desc.block_type.shape[1]
    row = gl.program_id(0) * BN
    part = gl.program_id(1)
    column = gl.program_id(2) * BM
    num_steps = K // (8 * GROUPS)
    share = gl.cdiv(num_steps, gl.num_programs(1))
    first = part * share
    last = gl.minimum(first + share, num_steps)
    L_X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    x_s = gl.allocate_shared_memory(x_desc.dtype, [8 * STAGES, BM, GROUPS], L_X)
    pairs_s = gl.allocate_shared_memory(gl.int32, [2 * STAGES, BN, GROUPS], pairs_desc.layout)
    masks_s = gl.allocate_shared_memory(gl.uint8, [STAGES, BN, GROUPS], masks_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    x_s, pairs_s, masks_s, full, empty, bias, out, row, column, part, last - first, M, N, stride_out,
                    stride_part, SYNCED, HAS_BIAS, EARLY,
                ),
            ),
            (
                _produce,
                (x_desc, pairs_desc, masks_desc, x_s, pairs_s, masks_s, full, empty, row, column, first, last, EARLY),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def max_registers(shape: SparseShape) -> int:
    """Registers per thread so that `shape.blocks` blocks fit an SM; the loading warp releases most of its own."""
    return min(240, 65536 // (128 * (shape.block_n // 64 + 1) * shape.blocks) // 8 * 8)


def sparse_product(x: Tensor, pairs: Tensor, masks: Tensor, bias: Tensor | None, shape: SparseShape) -> Tensor:
    """x [M, K] times the weight of pairs int32 [N, K/4] and masks uint8 [N, K/8], plus bias [N]: [M, N]."""
    (rows, columns), features = x.shape, len(pairs)
    out = x.new_empty(rows, features)
    if not out.numel():
        return out
    split = shape.parts > 1
    places = x.unflatten(1, (-1, 4)).permute(2, 0, 1).contiguous()
    groups = GROUPS.value
    x_desc = TensorDescriptor.from_tensor(places, [4, shape.block_m, groups], NVMMASharedLayout(64, 16, 3))
    pairs_desc = TensorDescriptor.from_tensor(pairs, [shape.block_n, groups], NVMMASharedLayout(128, 32, 2))
    masks_desc = TensorDescriptor.from_tensor(masks, [shape.block_n, groups], NVMMASharedLayout(32, 8, 2))
    parts = parts_of(rows, features, shape.parts, out)
    sparse_stream[(triton.cdiv(features, shape.block_n), shape.parts, triton.cdiv(rows, shape.block_m))](
        x_desc, pairs_desc, masks_desc, bias, parts, rows, features, columns, features, rows * features,
        STAGES=shape.stages, SYNCED=shape.block_m <= 32, HAS_BIAS=bias is not None and not split, EARLY=True,
        num_warps=shape.block_n // 16, maxnreg=max_registers(shape), launch_pdl=True,
    )  # fmt: skip
    return sum_parts(parts, bias, out) if split else out
