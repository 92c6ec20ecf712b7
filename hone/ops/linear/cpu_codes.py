"""Products of integer codes on a CPU, emitted as LLVM: codes of 8 and 4 bits times x of 16 bits, sums in int32 and float32.

A row of x becomes int16 codes with one scale, its largest magnitude / 32767 (`quantizer`). That rounds no more than bf16 does:
the largest magnitude is at most sqrt(K) times the root mean square, so the error is below 1e-3 of that for K < 10,000, and 4e-5
where values are spread as usual. Products of codes are exact sums of pairs in int32 (vpdpwssd, or vpmaddwd and an addition), and
become float32 once for each scale of the weight, 128 columns at most.

Legend: K columns of x, a multiple of 128. A row of x: K codes int16, then K / 128 vectors of 16 int32 that sums over codes
of 4 bits begin with (-8 times the sum of x: those codes are stored with 8 added), then its scale, float32.

4-bit codes come in blocks of 128 columns, 64 bytes: bits 4 j ... 4 j + 3 of 16-bit word i hold code + 8 of column
32 j + i; a block of four rows after another (`cpu_weights.pack_blocks`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hone.ops.cpu import vectors as v
from hone.ops.cpu.names import jitable
from hone.ops.cpu.vectors import (
    BYTES,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    WIDTH,
    WORDS,
    called,
    constant,
    fma,
    loaded,
    narrowed,
    pointer,
    splat,
    widened,
)
from hone.ops.linear.cpu_tiles import FETCHED, Sums, columns_loop, fetch, keep_state, state_of
from hone.ops.linear.cpu_weights import BLOCK

_SHORTS = ir.VectorType(I16, 2 * WIDTH)
_HALF = ir.VectorType(I16, WIDTH)
_LARGEST = 32767.0
_TINY = 1e-30


def _dot(builder: Any, isa: str, sums: Any, x: Any, y: Any) -> Any:
    """sums int32 [16] + the sums of pairs of products of x and y, int16 [32]."""
    if isa == "avx512_bf16":  # which has avx512_vnni
        wide = [builder.bitcast(one, WORDS) for one in (x, y)]
        return called(builder, "llvm.x86.avx512.vpdpwssd.512", WORDS, sums, *wide)
    if isa == "avx512":
        return builder.add(sums, called(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, x, y))
    eight = ir.VectorType(I32, 8)
    halves = []
    for half in range(2):
        lanes = ir.Constant(WORDS, list(range(16 * half, 16 * half + 16)))
        parts = [builder.shuffle_vector(one, one, lanes) for one in (x, y)]
        halves.append(called(builder, "llvm.x86.avx2.pmadd.wd", eight, *parts))
    return builder.add(sums, builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(16)))))


def _round_block(stored: str, isa: str) -> Any:
    """round_block(x, i, factor, codes, begins): 128 values of dtype `stored` from element i, times `factor`, as int16."""

    @intrinsic
    def round_block(typing: Any, x: Any, i: Any, factor: Any, codes: Any, begins: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, i, factor, codes, begins = args
            by, first = splat(builder, factor), builder.mul(i, I64(BYTES[stored]))
            sums = constant(WORDS, 0)
            for j in range(4):
                halves = []
                for half in range(2):
                    place = builder.add(first, I64(BYTES[stored] * (32 * j + 16 * half)))
                    value = builder.fmul(widened(builder, pointer(builder, x, place), stored), by)
                    value = called(builder, f"llvm.rint.v{WIDTH}f32", FLOATS, value)
                    halves.append(builder.trunc(builder.fptosi(value, WORDS), _HALF))
                lanes = ir.Constant(ir.VectorType(I32, 32), list(range(32)))
                both = builder.shuffle_vector(*halves, lanes)
                place = pointer(builder, codes, I64(64 * j))
                builder.store(both, builder.bitcast(place, _SHORTS.as_pointer()), align=1)
                sums = _dot(builder, isa, sums, both, constant(_SHORTS, -8))
            builder.store(sums, builder.bitcast(pointer(builder, begins), WORDS.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.float32, types.intp, types.intp), build

    return round_block


def quantizer(stored: str, isa: str) -> Any:
    """quantize(x, at, columns, out): one row of x, dtype `stored`, from element `at` as the products of codes read it.

    Infinities and NaN make the scale NaN, so every product with the row is NaN. Rows below 1e-30 become zeros.
    """
    round_block, load = _round_block(stored, isa), v.vector_load(stored)

    @jitable
    def quantize(x, at, columns, out):  # type: ignore[no-untyped-def]
        zero = v.broadcast(0.0)
        high, poison = zero, zero
        for i in range(0, columns, 16):
            part = load(x, at + i)
            high = v.larger(v.larger(part, v.sub(zero, part)), high)
            poison = v.muladd(part, zero, poison)
        top, factor = v.max_of(high), 0.0
        if top > _TINY:
            factor = _LARGEST / top
        else:
            top = 0.0
        begins = out + 2 * columns
        v.put_f32(begins + columns // 2, 0, top / _LARGEST + v.sum_of(poison))
        for i in range(0, columns, 128):
            round_block(x, at + i, factor, out + 2 * i, begins + i // 2)

    return quantize


def codes_tile(stored: str, rows: int, count: int, isa: str) -> Any:
    """tile(w, w_stride, x, x_stride, begins, begin, end, scales, scale_stride, group, state): state[r, m] += w[r] . x[m].

    For columns `begin` ... `end`, multiples of 128. `stored` is the weight's format: i8 or i4 (a scale for 128 or more columns),
    i8g or i4s (fewer). w is the first row's column 0; strides are in bytes; `begins` are those of the first row of x; f32 scales, each
    for 2**`group` columns; state f32 [rows, count, 16]. The scale of x is left to the caller.
    """
    fewer = stored in ("i8g", "i4s")

    @intrinsic
    def tile(
        typing: Any, w: Any, ws: Any, x: Any, xs: Any, begins: Any, begin: Any, end: Any, scales: Any, ss: Any, group: Any, state: Any,
    ) -> Any:  # fmt: skip
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, ws, x, xs, begins, begin, end, scales, ss, group, state = args
            weights = [_row(builder, stored, w, ws, r) for r in range(rows)]
            scale_rows = [pointer(builder, scales, builder.mul(I64(r), ss)) for r in range(rows)]
            inputs = [pointer(builder, x, builder.mul(I64(m), xs)) for m in range(count)]
            firsts = [pointer(builder, begins, builder.mul(I64(m), xs)) for m in range(count)]
            places, starts = state_of(builder, state, rows, count)

            def scale(row: Any, column: Any) -> Any:
                place = builder.shl(builder.lshr(column, group), I64(2))
                return splat(builder, loaded(builder, builder.gep(row, [place]), F32))

            def body(column: Any, sums: Sums) -> Sums:
                if count >= FETCHED:  # the next four rows
                    for row in weights:
                        ahead = builder.add(builder.shl(ws, I64(2)), _offset(builder, stored, column))
                        fetch(builder, row, ahead)
                        if stored in ("i8", "i8g"):
                            fetch(builder, row, builder.add(ahead, I64(64)))
                codes = [_codes(builder, stored, row, column) for row in weights]
                parts = [builder.add(column, I64(32 * j)) for j in range(4 if fewer else 1)]
                factors = [[scale(row, part) for part in parts] for row in scale_rows]
                for m in range(count):
                    at = builder.shl(column, I64(1))
                    xs = [
                        loaded(builder, builder.gep(inputs[m], [builder.add(at, I64(64 * j))]), _SHORTS)
                        for j in range(4)
                    ]
                    if stored == "i4":
                        start = loaded(builder, builder.gep(firsts[m], [builder.lshr(column, I64(1))]), WORDS)
                    else:
                        start = constant(WORDS, 0)
                    for r in range(rows):
                        found = start
                        for j in range(4):
                            found = _dot(builder, isa, found, codes[r][j], xs[j])
                            if fewer or j == 3:
                                factor = factors[r][j if fewer else 0]
                                sums[r][m] = fma(builder, builder.sitofp(found, FLOATS), factor, sums[r][m])
                                found = start
                return sums

            keep_state(builder, places, columns_loop(builder, begin, end, BLOCK, starts, body))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), build

    return tile


def _row(builder: Any, stored: str, w: Any, stride: Any, r: int) -> Any:
    """Row r of the weight at address w."""
    more = I64(64 * r) if stored in ("i4", "i4s") else builder.mul(I64(r), stride)
    return pointer(builder, w, more)


def _offset(builder: Any, stored: str, column: Any) -> Any:
    """Where the codes of a column begin in a row: with four rows' blocks in turn 128 columns take 256 bytes."""
    return builder.shl(column, I64(1)) if stored in ("i4", "i4s") else column


def _codes(builder: Any, stored: str, row: Any, column: Any) -> list[Any]:
    """The codes of 128 columns, int16, as four vectors of 32; those of i4 with 8 added."""
    if stored in ("i8", "i8g"):
        bytes_ = ir.VectorType(I8, 2 * WIDTH)
        places = [builder.gep(row, [builder.add(column, I64(32 * j))]) for j in range(4)]
        return [builder.sext(loaded(builder, place, bytes_), _SHORTS) for place in places]
    block = loaded(builder, builder.gep(row, [_offset(builder, stored, column)]), _SHORTS)
    shifted = [builder.lshr(block, constant(_SHORTS, 4 * j)) if j else block for j in range(4)]
    codes = [builder.and_(one, constant(_SHORTS, 15)) for one in shifted[:3]] + shifted[3:]
    return codes if stored == "i4" else [builder.sub(one, constant(_SHORTS, 8)) for one in codes]


def unpack_row(stored: str) -> Any:
    """row(blocks, out, columns, scales, group): 4-bit codes times their scales as `columns` values of dtype `stored`.

    `blocks` is the row's first; `columns` is a multiple of 16; f32 scales, each for 2**`group` columns.
    """

    @intrinsic
    def row(typing: Any, blocks: Any, out: Any, columns: Any, scales: Any, group: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            blocks, out, columns, scales, group = args

            def body(column: Any, sums: Sums) -> Sums:
                # Sixteen columns: half of the words of a block, and the nibble that their 32 columns have in each.
                first = builder.and_(column, I64(~127))
                words = builder.add(builder.shl(first, I64(1)), builder.shl(builder.and_(column, I64(16)), I64(1)))
                codes = loaded(builder, pointer(builder, blocks, words), _HALF)
                shift = builder.trunc(builder.shl(builder.and_(builder.lshr(column, I64(5)), I64(3)), I64(2)), I16)
                codes = builder.and_(builder.lshr(codes, splat(builder, shift, _HALF)), constant(_HALF, 15))
                codes = builder.sub(builder.zext(codes, WORDS), constant(WORDS, 8))
                place = pointer(builder, scales, builder.shl(builder.lshr(column, group), I64(2)))
                scale = splat(builder, loaded(builder, place, F32))
                value = narrowed(builder, builder.fmul(builder.sitofp(codes, FLOATS), scale), stored)
                place = pointer(builder, out, builder.mul(column, I64(BYTES[stored])))
                builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)
                return sums

            columns_loop(builder, I64(0), columns, 16, [], body)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), build

    return row
