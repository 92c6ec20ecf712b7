"""Products of x with a weight of 4-bit or 8-bit codes: dequantized in registers, straight into Hopper's tensor cores.

out^T = W x^T: a warpgroup multiplies 64 rows of the weight (wgmma's A operand, from registers) with the rows of x (its B
operand, from shared memory). One warp brings codes, scales and x through the tensor memory accelerator, several stages
ahead. The codes lie in the order of the A operand (hone.ops.formats.tile_codes): a thread reads 16 bytes, and each word of
8 nibbles becomes the four registers of one 16-column step, two codes at a time. (word >> 4 i) & 0x000F000F | 0x43004300 is
the pair (128 + q, 128 + q') of bfloat16, exactly; minus 136 and times the group's scale it is the dense weight, rounded as
`hone.ops.formats.dequantize` rounds it. Kim et al. 2022 (arXiv:2211.10017), Frantar et al. 2024 (Marlin, arXiv:2408.11743).

Shapes: x [M, K], codes int32 [N/64, K * bits/256, 128, 4], scales [G, N/16, 8, 2] (rows r and r + 8 of 16 side by side).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hone.ops.compat import tma_load
from hone.ops.gemm_shapes import QuantizedShape
from hone.ops.triton.skinny import parts_of, sum_parts

_BODIES = {
    # One word: nibbles i and i + 4 are register i. (word >> 4 i) & 0x000F000F | magic is the pair 2^7 + q (or 2^10 + q).
    4: """
shr.u32 t1, IN0, 4; shr.u32 t2, IN0, 8; shr.u32 t3, IN0, 12;
lop3.b32 t0, IN0, 0x000F000F, MAGIC, 0xEA; lop3.b32 t1, t1, 0x000F000F, MAGIC, 0xEA;
lop3.b32 t2, t2, 0x000F000F, MAGIC, 0xEA; lop3.b32 t3, t3, 0x000F000F, MAGIC, 0xEA;
""",
    # Two words of four bytes, a register from two neighbours: 2^10 + q in float16 ...
    (8, "f16"): """
prmt.b32 t0, IN0, MAGIC, 0x4140; prmt.b32 t1, IN0, MAGIC, 0x4342;
prmt.b32 t2, IN1, MAGIC, 0x4140; prmt.b32 t3, IN1, MAGIC, 0x4342;
""",
    # ... and for bfloat16, which has too few bits for that, 2^23 + q in float32, of which the upper halves are kept.
    (8, "bf16"): "".join(
        f"""
prmt.b32 e, {word}, 0x4B000000, 0x765{byte}; prmt.b32 o, {word}, 0x4B000000, 0x765{byte + 1};
sub.f32 e, e, 0f4B000080; sub.f32 o, o, 0f4B000080; prmt.b32 {into}, e, o, 0x7632;
"""
        for into, word, byte in (("t0", "IN0", 0), ("t1", "IN0", 2), ("t2", "IN1", 0), ("t3", "IN1", 2))
    ),
}
_SUBTRACT = "sub.KINDx2 t0, t0, ZERO; sub.KINDx2 t1, t1, ZERO; sub.KINDx2 t2, t2, ZERO; sub.KINDx2 t3, t3, ZERO;"
_SCALE = "mul.KINDx2 t0, t0, UP; mul.KINDx2 t1, t1, LOW; mul.KINDx2 t2, t2, UP; mul.KINDx2 t3, t3, LOW;"
_GIVE = "mov.b32 {$0, $1}, t0; mov.b32 {$2, $3}, t1; mov.b32 {$4, $5}, t2; mov.b32 {$6, $7}, t3;"
_NUMBERS = {(4, "bf16"): ("0x43004300", "0x43084308"), (4, "f16"): ("0x64006400", "0x64086408")}
_NUMBERS |= {(8, "bf16"): ("", ""), (8, "f16"): ("0x64646464", "0x64806480")}


@gluon.constexpr_function
def _assembly(bits, kind, scaled, centred):
    """PTX from one or two words ($8, $9) and the scales of rows r and r + 8 to eight halves ($0 ... $7)."""
    magic, zero = _NUMBERS[bits, kind]
    body = _BODIES[4 if bits == 4 else (8, kind)]
    body += (_SUBTRACT if centred and zero else "") + (_SCALE if scaled else "") + _GIVE
    inputs = 1 if bits == 4 else 2
    names = {"IN0": "$8", "IN1": "$9", "UP": f"${8 + inputs}", "LOW": f"${9 + inputs}"}
    for name, text in {**names, "KIND": kind, "MAGIC": magic, "ZERO": "z"}.items():
        body = body.replace(name, text)
    return "{ .reg .b32 t0, t1, t2, t3, z, e, o; mov.b32 z, " + (zero or "0") + ";" + body + "}"


@gluon.constexpr_function
def _constraints(bits, scaled):
    return ",".join(["=h"] * 8 + ["r"] * ((1 if bits == 4 else 2) + (2 if scaled else 0)))


@gluon.jit
def _previous_kernel_done():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _start_next_kernel():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _prefetch(pointer, BYTES: gl.constexpr):
    """Asks the L2 cache for BYTES from `pointer` on. Nothing is read, so this may run ahead of any wait."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], %d; mov.u32 $0, 0;" % BYTES,  # noqa: UP031
        "=r,l", [pointer.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _dequantize(
    words, second, pairs, DTYPE: gl.constexpr, BITS: gl.constexpr, SCALED: gl.constexpr, CENTRED: gl.constexpr
):
    """The weight [16 WARPS, 64] of words int32 [WARPS, 8, 4, GS, 4/GS] (8 bits: two) and pairs of scales, as int32."""
    KIND: gl.constexpr = "bf16" if DTYPE == gl.bfloat16 else "f16"  # noqa: SIM300
    ASM: gl.constexpr = _assembly(BITS, KIND, SCALED, CENTRED)
    CONSTRAINTS: gl.constexpr = _constraints(BITS, SCALED)
    # The scales of rows r and r + 8, each twice: one for either half of a register.
    if SCALED:
        up, low = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;", "=r,=r,r", [pairs],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        if BITS == 4:
            inputs = [words, up, low]
        else:
            inputs = [words, second, up, low]
    elif BITS == 4:
        inputs = [words]
    else:
        inputs = [words, second]
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, inputs, is_pure=True, pack=1,
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
    )  # fmt: skip
    near = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [..., column parity, row + 8]
    far = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    both = gl.join(near, far)  # [WARPS, 8, 4, GS, S, parity, row + 8, k + 8]
    weight = both.permute((0, 6, 1, 3, 4, 7, 2, 5)).reshape([16 * words.shape[0], 64])
    return weight.to(DTYPE, bitcast=True)


@gluon.jit
def _give(
    acc, scales, bias, out, tile, column, part, M, N, stride_out, stride_part,
    TILES: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Stores a tile of sums."""
    L_ACC: gl.constexpr = acc.type.layout
    rows = tile * 64 * TILES + gl.arange(0, 64 * TILES, gl.SliceLayout(1, L_ACC))
    columns = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, L_ACC))
    inside = rows < N
    if GROUP == 0:
        tiled = rows // 16 * 16 + rows % 8 * 2 + rows // 8 % 2
        acc = acc * gl.load(scales + tiled, mask=inside, other=0.0).to(gl.float32)[:, None]
    if HAS_BIAS:
        acc = acc + gl.load(bias + rows, mask=inside, other=0.0).to(gl.float32)[:, None]
    places = out + part.to(gl.int64) * stride_part + columns[None, :] * stride_out + rows[:, None]
    gl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < M))


@gluon.jit
def _load_codes(
    codes_desc, scales_desc, codes_s, scales_s, bar, slot, tile, chunk, num_chunks, BYTES: gl.constexpr,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(bar, BYTES)
    stage = codes_s.index(slot)._reinterpret(gl.int32, [TILES, BITS // 2 * CHUNKS, 256], codes_desc.layout)
    for t in gl.static_range(TILES):
        row = ((tile * TILES + t) * num_chunks + chunk) * (BITS // 2)
        tma_load(codes_desc, [row, 0], bar, stage.index(t))
    if GROUP > 0:
        tma_load(scales_desc, [chunk * 64 // GROUP, tile * TILES * 32], bar, scales_s.index(slot))


@gluon.jit
def _produce(
    x_desc, codes_desc, scales_desc, x_s, codes_s, scales_s, full, empty, tile, column, first, last, num_chunks,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One warp fills the stages: for CHUNKS chunks of 64 columns the codes of TILES x 64 rows, their scales, and x."""
    STAGES: gl.constexpr = full.type.shape[0]
    WEIGHTS: gl.constexpr = TILES * codes_desc.block_type.nbytes
    SCALES: gl.constexpr = scales_desc.block_type.nbytes if GROUP > 0 else 0
    BYTES: gl.constexpr = CHUNKS * x_desc.block_type.nbytes + WEIGHTS + SCALES
    if EARLY == 1:
        for s in gl.static_range(STAGES):
            if first + s * CHUNKS < last:
                _load_codes(
                    codes_desc, scales_desc, codes_s, scales_s, full.index(s), s, tile, first + s * CHUNKS,
                    num_chunks, BYTES, BITS, CHUNKS, GROUP, TILES,
                )  # fmt: skip
    if EARLY:
        _previous_kernel_done()
    step = 0
    for chunk in range(first, last, CHUNKS):
        slot = step % STAGES
        bar = full.index(slot)
        if EARLY != 1 or step >= STAGES:
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            _load_codes(
                codes_desc, scales_desc, codes_s, scales_s, bar, slot, tile, chunk, num_chunks, BYTES, BITS, CHUNKS,
                GROUP, TILES,
            )  # fmt: skip
        for i in gl.static_range(CHUNKS):
            tma_load(x_desc, [column, (chunk + i) * 64], bar, x_s.index(slot * CHUNKS + i))
        step += 1  # noqa: SIM113
    if EARLY:
        _start_next_kernel()


@gluon.jit
def _weight(
    codes_s, scales_s, slot, i: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, TILES: gl.constexpr, FOLD: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Chunk i of a stage as the A operand."""
    GS: gl.constexpr = 2 if GROUP == 32 else 1  # groups in a chunk
    WARPS: gl.constexpr = 4 * TILES
    HALVES: gl.constexpr = BITS // 4  # 16 bytes of a thread hold 64 or 32 columns
    L_RAW: gl.constexpr = gl.BlockedLayout(
        [1, 1, HALVES, 1, 1, 1, 4], [1, 1, 1, 1, 8, 4, 1], [TILES, 1, 1, 4, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    L_WORDS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, GS, 4 // GS], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0])
    stage = codes_s.index(slot)._reinterpret(gl.int32, [TILES, CHUNKS, HALVES, 4, 8, 4, 4], PLAIN)
    raw = stage.slice(i, 1, dim=1).load(L_RAW)
    if BITS == 4:
        words = gl.convert_layout(raw.reshape([WARPS, 8, 4, GS, 4 // GS]), L_WORDS, assert_trivial=True)
        second = words
    else:
        words, second = gl.split(raw.reshape([TILES, HALVES, 4, 8, 4, 2, 2]))
        words = words.permute((0, 2, 3, 4, 1, 5)).reshape([WARPS, 8, 4, GS, 4 // GS])
        second = second.permute((0, 2, 3, 4, 1, 5)).reshape([WARPS, 8, 4, GS, 4 // GS])
        words = gl.convert_layout(words, L_WORDS, assert_trivial=True)
        second = gl.convert_layout(second, L_WORDS, assert_trivial=True)
    pairs = words
    if GROUP > 0 and FOLD == 0:
        SETS: gl.constexpr = scales_s.type.shape[1] // GS
        PLAIN_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        L_PAIRS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, L_WORDS))
        scales = scales_s.index(slot)._reinterpret(gl.int32, [SETS, GS, WARPS, 8], PLAIN_3)
        mine = scales.index(i * SETS // CHUNKS).permute((1, 2, 0))
        pairs = mine.load(L_PAIRS).expand_dims(2).expand_dims(4)
    weight = _dequantize(words, second, pairs, DTYPE, BITS, GROUP > 0 and FOLD == 0, FOLD < 2)
    return gl.convert_layout(weight, operand, assert_trivial=True)


@gluon.jit
def _row_scales(
    scales_s, slot, i: gl.constexpr, DTYPE: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr,
    rows: gl.constexpr,
):  # fmt: skip
    """The scales of chunk i of a stage in float32, [64 TILES] in the layout `rows`."""
    WARPS: gl.constexpr = 4 * TILES
    SETS: gl.constexpr = scales_s.type.shape[1]
    L_ROWS: gl.constexpr = gl.SliceLayout(
        3, gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    stage = scales_s.index(slot)._reinterpret(DTYPE, [SETS, WARPS, 8, 2], PLAIN)
    scales = stage.index(i * SETS // CHUNKS).permute((0, 2, 1)).load(L_ROWS)
    return gl.convert_layout(scales.to(gl.float32).reshape([64 * TILES]), rows, assert_trivial=True)


@gluon.jit
def _consume(
    x_s, codes_s, scales_s, full, empty, scales, bias, out, tile, column, part, first, last, M, N, stride_out, stride_part,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr, FOLD: gl.constexpr,
    HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiplies stage by stage: while the tensor cores work on one chunk, the next is dequantized."""
    STAGES: gl.constexpr = full.type.shape[0]
    BM: gl.constexpr = x_s.type.shape[1]
    DTYPE: gl.constexpr = x_s.dtype
    L_ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4 * TILES, 1], instr_shape=[16, BM, 16]
    )
    L_A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L_ACC, k_width=2)
    # With FOLD a group's sum is taken from bare codes, then scaled and added to the whole.
    PER: gl.constexpr = (CHUNKS if GROUP >= 64 * CHUNKS else GROUP // 64) if FOLD > 0 else 0
    acc = gl.zeros([64 * TILES, BM], gl.float32, L_ACC)
    if FOLD == 2:
        centre = gl.full([64 * TILES, 64], -136.0 if DTYPE == gl.bfloat16 else -1032.0, DTYPE, L_A)  # noqa: SIM300
    group = acc
    step = 0
    for _ in range(first, last, CHUNKS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        weight = _weight(codes_s, scales_s, slot, 0, DTYPE, BITS, CHUNKS, GROUP, TILES, FOLD, L_A)
        for i in gl.static_range(CHUNKS):
            xs = x_s.index(slot * CHUNKS + i).permute((1, 0))
            if FOLD > 0:
                token = warpgroup_mma(weight, xs, group, use_acc=i % PER != 0, is_async=True)
            else:
                token = warpgroup_mma(weight, xs, acc, is_async=True)
            if FOLD == 2:
                token = warpgroup_mma(centre, xs, token, is_async=True)
            if i + 1 < CHUNKS:
                following = _weight(codes_s, scales_s, slot, i + 1, DTYPE, BITS, CHUNKS, GROUP, TILES, FOLD, L_A)
            if FOLD > 0:
                factor = group
                if (i + 1) % PER == 0:
                    factor = _row_scales(scales_s, slot, i, DTYPE, CHUNKS, TILES, gl.SliceLayout(1, L_ACC))[:, None]
                group, weight = warpgroup_mma_wait(0, deps=[token, weight])
                if (i + 1) % PER == 0:
                    acc += group * factor
            else:
                acc, weight = warpgroup_mma_wait(0, deps=[token, weight])
            if i + 1 < CHUNKS:
                weight = following
        gl.thread_barrier()
        mbarrier.arrive(empty.index(slot))
        step += 1  # noqa: SIM113
    if EARLY:
        _previous_kernel_done()
    _give(acc, scales, bias, out, tile, column, part, M, N, stride_out, stride_part, TILES, GROUP, HAS_BIAS)


@gluon.jit(do_not_specialize=["M"])
def w4_stream(
    x_desc, codes_desc, scales_desc, codes, scales, bias, out, M, N, K, stride_out, stride_part,
    BITS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
    FOLD: gl.constexpr, HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One tile of out^T, 64 TILES rows of the weight by all of x, over one part of K; N is padded to whole tiles.

    With GROUP 0 a row has one scale, which multiplies the sum. With parts of K, `out` is float32 [S, M, N].
    """
    BM: gl.constexpr = x_desc.block_type.shape[0]
    tile = gl.program_id(0)
    part = gl.program_id(1)
    column = gl.program_id(2) * BM
    num_chunks = K // 64
    share = gl.cdiv(num_chunks, gl.num_programs(1) * CHUNKS) * CHUNKS
    first = part * share
    last = gl.minimum(first + share, num_chunks)
    if EARLY > 1:
        for t in gl.static_range(TILES):
            ahead = ((tile * TILES + t).to(gl.int64) * num_chunks + first) * (BITS * 128)
            _prefetch(codes + ahead, EARLY)
    x_s = gl.allocate_shared_memory(x_desc.dtype, [STAGES * CHUNKS, BM, 64], x_desc.layout)
    codes_s = gl.allocate_shared_memory(gl.int32, [STAGES, TILES * BITS // 2 * CHUNKS, 256], codes_desc.layout)
    if GROUP > 0:
        box: gl.constexpr = scales_desc.block_type.shape
        scales_s = gl.allocate_shared_memory(gl.int32, [STAGES, box[0], box[1]], scales_desc.layout)
    else:
        scales_s = codes_s
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
                    x_s, codes_s, scales_s, full, empty, scales, bias, out, tile, column, part, first, last, M, N,
                    stride_out, stride_part, BITS, CHUNKS, GROUP, TILES, FOLD, HAS_BIAS, EARLY,
                ),
            ),
            (
                _produce,
                (
                    x_desc, codes_desc, scales_desc, x_s, codes_s, scales_s, full, empty, tile, column, first,
                    last, num_chunks, BITS, CHUNKS, GROUP, TILES, EARLY,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def max_registers(shape: QuantizedShape) -> int:
    """Registers a thread so that `shape.blocks` blocks fit an SM; the loading warp hands most of its own over."""
    return min(240, 65536 // (128 * (shape.tiles + 1) * shape.blocks) // 8 * 8)


def quantized_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, bits: int, features: int, shape: QuantizedShape
) -> Tensor:
    """x [M, K] times tiled codes and scales, plus bias [N]: [M, N]. x's rows are 16-byte aligned."""
    rows, columns = x.shape
    out = x.new_empty(rows, features)
    if not out.numel():
        return out
    chunks, tiles, split = shape.chunks, shape.tiles, shape.parts > 1
    group = 0 if len(scales) == 1 else columns // len(scales)
    wide = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    x_desc = TensorDescriptor(x, [rows, columns], [x.stride(0), 1], [shape.block_m, 64], wide)
    codes_desc = TensorDescriptor.from_tensor(codes.view(-1, 256), [bits // 2 * chunks, 256], plain)
    scales_desc = scales
    if group:
        pairs = scales.to(x.dtype).view(len(scales), -1).view(torch.int32)
        scales_desc = TensorDescriptor.from_tensor(pairs, [max(1, 64 * chunks // group), 32 * tiles], plain)
    parts = parts_of(rows, features, shape.parts, out)
    w4_stream[(triton.cdiv(features, 64 * tiles), shape.parts, triton.cdiv(rows, shape.block_m))](
        x_desc, codes_desc, scales_desc, codes, scales, bias, parts, rows, features, columns, features, rows * features,
        BITS=bits, CHUNKS=chunks, STAGES=shape.stages, GROUP=group, TILES=tiles, FOLD=int(shape.fold),
        HAS_BIAS=bias is not None and not split, EARLY=int(shape.early), num_warps=4 * tiles,
        maxnreg=max_registers(shape), launch_pdl=shape.early,
    )  # fmt: skip
    return sum_parts(parts, bias, out) if split else out
