"""Products of x with a weight of 4-bit codes: dequantized in registers, straight into Hopper's tensor cores.

out^T = W x^T: a warpgroup multiplies 64 rows of the weight (wgmma's A operand, from registers) with all rows of x (its B
operand, from shared memory). The weight is stored in the order of the A operand (hone.ops.formats.tile_codes): a thread
reads 16 bytes, 4 words of 8 codes, and each word becomes the four registers of one k16 step, two codes at a time:
(word >> 4 i) & 0x000F000F | 0x43004300 is the pair (128 + q, 128 + q') of bfloat16, exactly; minus 136 and times the
group's scale it is the dense weight, rounded as `hone.ops.formats.dequantize` rounds it. The trick is that of Kim et al.
2022 (arXiv:2211.10017) and Frantar et al. 2024 (Marlin, arXiv:2408.11743).

Shapes: x [M, K], codes int32 [N/64, K/64, 128, 4], scales [G, N/16, 8, 2]; rows r and r + 8 of 16 share a word of scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

_UNPACK = """
shr.u32 t1, $8, 4; shr.u32 t2, $8, 8; shr.u32 t3, $8, 12;
lop3.b32 t0, $8, 0x000F000F, MAGIC, 0xEA;
lop3.b32 t1, t1, 0x000F000F, MAGIC, 0xEA;
lop3.b32 t2, t2, 0x000F000F, MAGIC, 0xEA;
lop3.b32 t3, t3, 0x000F000F, MAGIC, 0xEA;
sub.KINDx2 t0, t0, z; sub.KINDx2 t1, t1, z; sub.KINDx2 t2, t2, z; sub.KINDx2 t3, t3, z;
"""
_SCALE = "mul.KINDx2 t0, t0, $9; mul.KINDx2 t1, t1, $10; mul.KINDx2 t2, t2, $9; mul.KINDx2 t3, t3, $10;"
_GIVE = "mov.b32 {$0, $1}, t0; mov.b32 {$2, $3}, t1; mov.b32 {$4, $5}, t2; mov.b32 {$6, $7}, t3;"


def _assembly(kind: str, magic: str, zero: str, scaled: bool) -> gl.constexpr:
    body = _UNPACK + (_SCALE if scaled else "") + _GIVE
    text = "{ .reg .b32 t0, t1, t2, t3, z; mov.b32 z, ZERO;" + body + "}"
    return gl.constexpr(text.replace("KIND", kind).replace("MAGIC", magic).replace("ZERO", zero))


_BF16 = _assembly("bf16", "0x43004300", "0x43084308", scaled=False)
_BF16_SCALED = _assembly("bf16", "0x43004300", "0x43084308", scaled=True)
_FP16 = _assembly("f16", "0x64006400", "0x64086408", scaled=False)
_FP16_SCALED = _assembly("f16", "0x64006400", "0x64086408", scaled=True)
_OUT = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
_OUT_SCALED = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")


@gluon.jit
def _after_previous_kernel(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _dequantize(words, pairs, DTYPE: gl.constexpr, SCALED: gl.constexpr, WARPS: gl.constexpr, operand: gl.constexpr):
    """The A operand [16 WARPS, 64] of words int32 [WARPS, 8, 4, GS, 4/GS] and pairs of scales int32 [WARPS, 8, 1, GS, 1]."""
    # The scales of rows r and r + 8, each twice: one for either half of a register.
    if SCALED:
        upper, lower = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;", "=r,=r,r", [pairs],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    if DTYPE == gl.bfloat16 and SCALED:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _BF16_SCALED, _OUT_SCALED, [words, upper, lower], is_pure=True, pack=1,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        )  # fmt: skip
    elif DTYPE == gl.bfloat16:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _BF16, _OUT, [words], is_pure=True, pack=1,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        )  # fmt: skip
    elif SCALED:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _FP16_SCALED, _OUT_SCALED, [words, upper, lower], is_pure=True, pack=1,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        )  # fmt: skip
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            _FP16, _OUT, [words], is_pure=True, pack=1,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        )  # fmt: skip
    near = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [..., column parity, row + 8]
    far = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    both = gl.join(near, far)  # [WARPS, 8, 4, GS, S, parity, row + 8, k + 8]
    weight = both.permute((0, 6, 1, 3, 4, 7, 2, 5)).reshape([16 * WARPS, 64])
    return gl.convert_layout(weight, operand, assert_trivial=True)


@gluon.jit
def _fetch(
    x, codes, scales, x_s, codes_s, scales_s, slot, chunk, last, tile, M, padded, num_chunks, stride_x,
    BM: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, GS: gl.constexpr,
    PER: gl.constexpr,
):  # fmt: skip
    """Starts the copies of one stage: CHUNKS chunks of 64 columns of the weight, its scales and x; zeros beyond `last`."""
    L_X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    L_W: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    L_S: gl.constexpr = gl.BlockedLayout([1, 1, 1], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    rows = gl.arange(0, BM, gl.SliceLayout(1, L_X))
    columns = gl.arange(0, 64, gl.SliceLayout(0, L_X))
    from_x = x + rows[:, None] * stride_x + columns[None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L_W))))[:, None, None, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L_W))))[None, :, None, None]
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L_W))))[None, None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L_W))))[None, None, None, :]
    # A tile of 64 rows is 512 words a chunk; with 8 warps, two tiles lie num_chunks chunks apart.
    high = (tile * (WARPS // 4) + warp // 4).to(gl.int64) * num_chunks
    from_codes = codes + high * 512 + (((warp % 4) * 8 + row) * 4 + pair) * 4 + word
    for i in gl.static_range(CHUNKS):
        here = chunk + i
        inside = here < last
        async_copy.async_copy_global_to_shared(
            codes_s.index(slot * CHUNKS + i), from_codes + here * 512, mask=inside & (word >= 0)
        )
        async_copy.async_copy_global_to_shared(
            x_s.index(slot * CHUNKS + i), from_x + here * 64, mask=inside & (rows[:, None] < M)
        )
    if GROUP > 0:
        SETS: gl.constexpr = CHUNKS // PER
        warp_s = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, L_S)))[:, None, None]
        row_s = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L_S)))[None, :, None]
        set_s = gl.arange(0, GS, gl.SliceLayout(0, gl.SliceLayout(1, L_S)))[None, None, :]
        from_scales = scales + (tile * WARPS + warp_s) * 8 + row_s
        for i in gl.static_range(SETS):
            here = chunk + i * PER
            group = (here * 64) // GROUP + set_s
            async_copy.async_copy_global_to_shared(
                scales_s.index(slot * SETS + i), from_scales + group * (padded // 2), mask=(here < last) & (set_s >= 0)
            )


@gluon.jit(do_not_specialize=["M"])
def w4_skinny(
    x, codes, scales, bias, out, M, N, K, stride_x, stride_out, stride_part,
    BM: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One tile of out^T, 16 rows of the weight a warp, over one part of K; N is padded to whole tiles.

    With GROUP 0 a row has one scale, which multiplies the sum. With PARTS > 1, `out` is float32 [S, M, N] and takes the
    part's sum without the bias.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = x.dtype.element_ty
    GS: gl.constexpr = 2 if GROUP == 32 else 1  # groups in a chunk of 64 columns
    WIDE: gl.constexpr = CHUNKS if GROUP >= 64 * CHUNKS else GROUP // 64
    PER: gl.constexpr = WIDE if GROUP >= 64 else 1  # chunks that share their scales
    SETS: gl.constexpr = CHUNKS // PER
    L_ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BM, 16])
    L_A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L_ACC, k_width=2)
    L_WORDS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, GS, 4 // GS], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )
    L_PAIRS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, L_WORDS))
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN_4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    PLAIN_3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_s = gl.allocate_shared_memory(DTYPE, [STAGES * CHUNKS, BM, 64], X_SHARED)
    codes_s = gl.allocate_shared_memory(gl.int32, [STAGES * CHUNKS, WARPS, 8, 4, 4], PLAIN_4)
    scales_s = gl.allocate_shared_memory(gl.int32, [STAGES * SETS, WARPS, 8, GS], PLAIN_3)

    tile = gl.program_id(0)
    part = gl.program_id(1)
    num_chunks = K // 64
    padded = gl.cdiv(N, 128) * 128
    share = gl.cdiv(num_chunks, PARTS * CHUNKS) * CHUNKS
    first = part * share
    last = gl.minimum(first + share, num_chunks)
    _after_previous_kernel(EARLY)
    for s in gl.static_range(STAGES - 1):
        _fetch(
            x, codes, scales, x_s, codes_s, scales_s, s, first + s * CHUNKS, last, tile, M, padded, num_chunks, stride_x,
            BM, WARPS, CHUNKS, GROUP, GS, PER,
        )  # fmt: skip
        async_copy.commit_group()
    acc = gl.zeros([16 * WARPS, BM], gl.float32, L_ACC)
    step = 0
    for chunk in range(first, last, CHUNKS):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        _fetch(
            x, codes, scales, x_s, codes_s, scales_s, (step + STAGES - 1) % STAGES, chunk + (STAGES - 1) * CHUNKS,
            last, tile, M, padded, num_chunks, stride_x, BM, WARPS, CHUNKS, GROUP, GS, PER,
        )  # fmt: skip
        async_copy.commit_group()
        slot = step % STAGES
        for i in gl.static_range(CHUNKS):
            words = codes_s.index(slot * CHUNKS + i).reshape([WARPS, 8, 4, GS, 4 // GS]).load(L_WORDS)
            if GROUP > 0:
                pairs = scales_s.index(slot * SETS + i // PER).load(L_PAIRS).expand_dims(2).expand_dims(4)
            else:
                pairs = words
            weight = _dequantize(words, pairs, DTYPE, GROUP > 0, WARPS, L_A)
            acc = warpgroup_mma(weight, x_s.index(slot * CHUNKS + i).permute((1, 0)), acc)
        step += 1
    async_copy.wait_group(0)
    _give(acc, scales, bias, out, tile, part, M, N, stride_out, stride_part, BM, WARPS, GROUP, HAS_BIAS, PARTS, L_ACC)


@gluon.jit
def _give(
    acc, scales, bias, out, tile, part, M, N, stride_out, stride_part,
    BM: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    L_ACC: gl.constexpr,
):  # fmt: skip
    rows = tile * 16 * WARPS + gl.arange(0, 16 * WARPS, gl.SliceLayout(1, L_ACC))
    columns = gl.arange(0, BM, gl.SliceLayout(0, L_ACC))
    inside = rows < N
    if GROUP == 0:
        acc = acc * gl.load(scales + rows, mask=inside, other=0.0).to(gl.float32)[:, None]
    if HAS_BIAS:
        acc = acc + gl.load(bias + rows, mask=inside, other=0.0).to(gl.float32)[:, None]
    places = out + part.to(gl.int64) * stride_part + columns[None, :] * stride_out + rows[:, None]
    gl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < M))
