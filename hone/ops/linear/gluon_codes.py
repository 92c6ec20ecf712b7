"""Dequantization in registers, shared by the kernels of 4-bit and 8-bit weights.

The codes are in the order of a tensor core's A operand (hone.ops.formats.tile_codes): a thread reads 16 bytes, and each
word of 8 nibbles becomes the four registers of one 16-column step, two codes at a time. (word >> 4 i) & 0x000F000F |
0x43004300 is the pair (128 + q, 128 + q') of bfloat16, exactly; minus 136 and times the group's scale it is the dense
weight, rounded as `hone.ops.formats.dequantize` rounds it. Kim et al. 2022 (arXiv:2211.10017).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def _assembly(bits, kind, scaled):
    """PTX that turns one or two words ($8, $9) and the scales of rows r and r + 8 into eight 16-bit values ($0 ... $7)."""
    magic, zero = _NUMBERS[bits, kind]
    body = _BODIES[4 if bits == 4 else (8, kind)]
    body += (_SUBTRACT if zero else "") + (_SCALE if scaled else "") + _GIVE
    inputs = 1 if bits == 4 else 2
    names = {"IN0": "$8", "IN1": "$9", "UP": f"${8 + inputs}", "LOW": f"${9 + inputs}"}
    for name, text in {**names, "KIND": kind, "MAGIC": magic, "ZERO": "z"}.items():
        body = body.replace(name, text)
    return "{ .reg .b32 t0, t1, t2, t3, z, e, o; mov.b32 z, " + (zero or "0") + ";" + body + "}"


@gluon.constexpr_function
def _constraints(bits, scaled):
    return ",".join(["=h"] * 8 + ["r"] * ((1 if bits == 4 else 2) + (2 if scaled else 0)))


@gluon.jit
def previous_kernel_done():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_next_kernel():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def dequantize(words, second, pairs, DTYPE: gl.constexpr, BITS: gl.constexpr, SCALED: gl.constexpr):
    """The weight [16 WARPS, 16 GS S] of words int32 [WARPS, 8, 4, GS, S] (8 bits: two) and pairs of scales, as int32.

    Without SCALED the codes are not multiplied by scales.
    """
    KIND: gl.constexpr = "bf16" if DTYPE == gl.bfloat16 else "f16"  # noqa: SIM300
    ASM: gl.constexpr = _assembly(BITS, KIND, SCALED)
    CONSTRAINTS: gl.constexpr = _constraints(BITS, SCALED)
    # The scales of rows r and r + 8, each twice: once for each half of a register.
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
    weight = both.permute((0, 6, 1, 3, 4, 7, 2, 5)).reshape([16 * words.shape[0], 16 * words.shape[3] * words.shape[4]])
    return weight.to(DTYPE, bitcast=True)
