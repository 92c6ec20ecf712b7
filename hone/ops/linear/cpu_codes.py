"""Products of integer codes on a CPU, emitted as LLVM: codes of 8 and 4 bits times x of 16 bits, sums in int32 and float32.

A row of x becomes int16 codes with one scale, its largest magnitude / 32639 (`quantizer`). That rounds no more than bf16 does:
the largest magnitude is at most sqrt(K) times the root mean square, so the error is below 1e-3 of that for K < 10,000, and 4e-5
where values are spread as usual. Sums of products of codes are exact in int32, and become float32 once for each scale of the
weight, 128 columns at most.

Codes of 8 bits are widened to 16 and multiplied in pairs (vpdpwssd, or vpmaddwd and an addition). Codes of 4 bits stay bytes, with 8
added, and x is taken as two bytes, 256 high + low (vpdpbusd, or vpmaddubsw, whose sums of up to 8 products fit 16 bits):
half as much unpacking. 32639 is the largest code whose high byte, rounded to the nearest, is 127.

Legend: K columns of x, a multiple of 128. A row of x: K codes of 2 bytes, then K / 128 vectors of 16 int32 that sums over codes
of 4 bits begin with (-8 times sums of x), then its scale, float32. For codes of 8 bits x is int16 in the order of
columns; for those of 4 bits 128 columns are 64 high bytes of the columns of lower nibbles, 64 of the upper ones', and their low bytes.

4-bit codes come in blocks of 128 columns, 64 bytes: byte 16 j + i holds code + 8 of column 32 j + i, and in its upper half
of column 32 j + 16 + i; a block of four rows after another (`cpu_weights.pack_blocks`).
"""

from __future__ import annotations

from functools import reduce
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
_LARGEST = 32639.0
_TINY = 1e-30
_AHEAD = 1024
"""Bytes by which 4-bit codes are asked for ahead, four blocks of four rows."""


def _dot(builder: Any, isa: str, sums: Any, x: Any, y: Any) -> Any:
    """sums int32 [16] + the sums of pairs of products of x and y, int16 [32]."""
    if isa == "avx512_bf16":  # which has avx512_vnni
        wide = [builder.bitcast(one, WORDS) for one in (x, y)]
        return called(builder, "llvm.x86.avx512.vpdpwssd.512", WORDS, sums, *wide)
    if isa == "avx512":
        return builder.add(sums, _pairs(builder, x, y))
    halves = []
    for half in range(2):
        lanes = ir.Constant(WORDS, list(range(16 * half, 16 * half + 16)))
        halves.append(_pairs(builder, *(builder.shuffle_vector(one, one, lanes) for one in (x, y))))
    return builder.add(sums, builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(16)))))


def _pairs(builder: Any, x: Any, y: Any) -> Any:
    """Sums int32 of pairs of products of x and y, int16 [32] or [16]."""
    name = "llvm.x86.avx2.pmadd.wd" if x.type.count == WIDTH else "llvm.x86.avx512.pmaddw.d.512"
    return called(builder, name, ir.VectorType(I32, x.type.count // 2), x, y)


def _byte_dot(builder: Any, isa: str, start: Any, codes: list[Any], x: tuple[list[Any], list[Any]]) -> Any:
    """start int32 [B / 4] + sums of products of up to four vectors of codes, uint8 [B] below 16, and x, high and low bytes of each."""

    def summed(octets: list[Any], start: Any) -> Any:
        if isa == "avx512_bf16":  # which has avx512_vnni
            for code, one in zip(codes, octets):
                wide = [builder.bitcast(each, WORDS) for each in (code, one)]
                start = called(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, start, *wide)
            return start
        name = "llvm.x86.avx2.pmadd.ub.sw" if isa == "avx2" else "llvm.x86.avx512.pmaddubs.w.512"
        short = ir.VectorType(I16, 2 * start.type.count)
        parts = [called(builder, name, short, code, one) for code, one in zip(codes, octets)]
        return reduce(builder.add, parts)

    nothing = constant(start.type, 0)
    if isa == "avx512_bf16":
        return builder.add(summed(x[1], start), builder.shl(summed(x[0], nothing), constant(WORDS, 8)))
    highs, lows = (summed(octets, nothing) for octets in x)
    by_256, by_1 = (_pairs(builder, one, constant(one.type, by)) for one, by in ((highs, 256), (lows, 1)))
    return builder.add(builder.add(by_256, by_1), start)


def _round_block(stored: str, *, split: bool) -> Any:
    """round_block(x, i, factor, codes, begins): 128 values of dtype `stored` from element i, times `factor`, as codes.

    Int16, or for `split` bytes and first sums, as products of 4-bit codes read them.
    """

    @intrinsic
    def round_block(typing: Any, x: Any, i: Any, factor: Any, codes: Any, begins: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, i, factor, codes, begins = args
            by, first = splat(builder, factor), builder.mul(i, I64(BYTES[stored]))

            def store(value: Any, address: Any, offset: int) -> None:
                place = pointer(builder, address, I64(offset))
                builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)

            for j in range(4):
                words = []
                for half in range(2):
                    place = builder.add(first, I64(BYTES[stored] * (32 * j + 16 * half)))
                    value = builder.fmul(widened(builder, pointer(builder, x, place), stored), by)
                    value = builder.fptosi(called(builder, f"llvm.rint.v{WIDTH}f32", FLOATS, value), WORDS)
                    words.append(value)
                    if not split:
                        store(builder.trunc(value, _HALF), codes, 64 * j + 32 * half)
                        continue
                    high = builder.ashr(builder.add(value, constant(WORDS, 128)), constant(WORDS, 8))
                    low = builder.sub(value, builder.shl(high, constant(WORDS, 8)))
                    for part, octets in enumerate((high, low)):
                        store(builder.trunc(octets, ir.VectorType(I8, WIDTH)), codes, 128 * part + 64 * half + 16 * j)
                if split:
                    sums = builder.mul(builder.add(*words), constant(WORDS, -8))
                    for lanes in (8, 4):  # those of 32 columns are in four lanes, as in products
                        halves = [
                            builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(I32, lanes), list(each)))
                            for each in (range(lanes), range(lanes, 2 * lanes))
                        ]
                        sums = builder.add(*halves)
                    store(sums, begins, 16 * j)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.float32, types.intp, types.intp), build

    return round_block


def quantizer(stored: str, *, split: bool) -> Any:
    """quantize(x, at, columns, out): one row of x, dtype `stored`, from element `at` as the products of codes read it.

    `split` is for codes of 4 bits.

    Infinities and NaN make the scale NaN, so every product with the row is NaN. Rows below 1e-30 become zeros.
    """
    round_block, load = _round_block(stored, split=split), v.vector_load(stored)

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
    nibbles, fewer = stored in ("i4", "i4s"), stored in ("i8g", "i4s")
    # 4-bit codes are multiplied in the CPU's own width: 32 or 64 bytes.
    lanes = 8 if nibbles and isa == "avx2" else WIDTH

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
            places, starts = state_of(builder, state, rows, count, ir.VectorType(F32, lanes))

            def scale(r: int, column: Any, lanes: int) -> Any:
                place = builder.shl(builder.lshr(column, group), I64(2))
                value = loaded(builder, builder.gep(scale_rows[r], [place]), F32)
                return splat(builder, value, ir.VectorType(F32, lanes))

            body = _nibbles_body if nibbles else _bytes_body
            row_of = body(builder, isa, fewer, weights, inputs, firsts, scale)

            def columns(column: Any, sums: Sums) -> Sums:
                if count >= FETCHED:  # the next four rows
                    for row in weights:
                        ahead = builder.add(builder.shl(ws, I64(2)), _offset(builder, stored, column))
                        for more in range(1 if nibbles else 2):
                            fetch(builder, row, builder.add(ahead, I64(64 * more)))
                elif (
                    nibbles
                ):  # which arrive more slowly than they are multiplied, however well the hardware foresees them
                    for row in weights:
                        fetch(builder, row, builder.add(_offset(builder, stored, column), I64(_AHEAD)))
                for r in range(rows):
                    for m, products in enumerate(row_of(r, column)):
                        for found, factor in products:
                            wide = builder.sitofp(found, sums[r][m].type)
                            sums[r][m] = fma(builder, wide, factor, sums[r][m])
                return sums

            keep_state(builder, places, columns_loop(builder, begin, end, BLOCK, starts, columns))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), build

    return tile


def _bytes_body(builder: Any, isa: str, fewer: bool, weights: Any, inputs: Any, firsts: Any, scale: Any) -> Any:
    """row_of(r, column): for each row of x sums of products with 128 codes of 8 bits of row r, and the factors of the sums."""

    def row_of(r: int, column: Any) -> Any:
        parts = [builder.add(column, I64(32 * j)) for j in range(4)]
        bytes_ = ir.VectorType(I8, 2 * WIDTH)
        codes = [builder.sext(loaded(builder, builder.gep(weights[r], [part]), bytes_), _SHORTS) for part in parts]
        factors = [scale(r, part, WIDTH) for part in (parts if fewer else parts[:1])]
        for row in inputs:
            xs = [loaded(builder, builder.gep(row, [builder.shl(part, I64(1))]), _SHORTS) for part in parts]
            found, products = constant(WORDS, 0), []
            for j in range(4):
                found = _dot(builder, isa, found, codes[j], xs[j])
                if fewer or j == 3:
                    products.append((found, factors[j if fewer else 0]))
                    found = constant(WORDS, 0)
            yield products

    return row_of


def _nibbles_body(builder: Any, isa: str, fewer: bool, weights: Any, inputs: Any, firsts: Any, scale: Any) -> Any:
    """`_bytes_body` for codes of 4 bits."""
    width = 32 if isa == "avx2" else 64
    octets, shorts, words = (ir.VectorType(kind, width // (kind.width // 8)) for kind in (I8, I16, I32))
    offsets = range(0, 64, width)
    # Sums of products that a scale belongs to come together: of the whole block, or of one vector of it.
    together = [[offset] for offset in offsets] if fewer else [list(offsets)]

    def nibbles(row: Any, place: Any) -> list[Any]:
        block = loaded(builder, builder.gep(row, [place]), octets)
        upper = builder.bitcast(builder.lshr(builder.bitcast(block, shorts), constant(shorts, 4)), octets)
        return [builder.and_(one, constant(octets, 15)) for one in (block, upper)]

    def factor(r: int, column: Any, offset: int) -> Any:
        if not fewer:
            return scale(r, column, words.count)
        each = [scale(r, builder.add(column, I64(2 * offset + 32 * g)), words.count) for g in range(width // 16)]
        while len(each) > 1:  # four lanes of the first, four of the second, ...
            span = words.count // len(each)
            lanes = [lane + words.count * (lane // span % 2) for lane in range(words.count)]
            each = [
                builder.shuffle_vector(one, other, ir.Constant(words, lanes))
                for one, other in zip(each[::2], each[1::2])
            ]
        return each[0]

    def row_of(r: int, column: Any) -> Any:
        place = builder.shl(column, I64(1))
        codes = {offset: nibbles(weights[r], builder.add(place, I64(offset))) for offset in offsets}
        factors = [factor(r, column, each[0]) for each in together]

        def x_at(row: Any, offset: int) -> Any:
            return loaded(builder, builder.gep(row, [builder.add(place, I64(offset))]), octets)

        for row, first in zip(inputs, firsts):
            products = []
            for each, by in zip(together, factors):
                halves = tuple(
                    [x_at(row, part + half + offset) for offset in each for half in (0, 64)] for part in (0, 128)
                )
                start = constant(words, 0)
                for offset in each:
                    at = builder.add(builder.lshr(column, I64(1)), I64(offset))
                    start = builder.add(start, loaded(builder, builder.gep(first, [at]), words))
                found = _byte_dot(builder, isa, start, [code for offset in each for code in codes[offset]], halves)
                products.append((found, by))
            yield products

    return row_of


def _row(builder: Any, stored: str, w: Any, stride: Any, r: int) -> Any:
    """Row r of the weight at address w."""
    more = I64(64 * r) if stored in ("i4", "i4s") else builder.mul(I64(r), stride)
    return pointer(builder, w, more)


def _offset(builder: Any, stored: str, column: Any) -> Any:
    """Where the codes of a column begin in a row: with four rows' blocks in turn 128 columns take 256 bytes."""
    return builder.shl(column, I64(1)) if stored in ("i4", "i4s") else column


def unpack_row(stored: str) -> Any:
    """row(blocks, out, columns, scales, group): 4-bit codes times their scales as `columns` values of dtype `stored`.

    `blocks` is the row's first; `columns` is a multiple of 16; f32 scales, each for 2**`group` columns.
    """

    @intrinsic
    def row(typing: Any, blocks: Any, out: Any, columns: Any, scales: Any, group: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            blocks, out, columns, scales, group = args

            def body(column: Any, sums: Sums) -> Sums:
                # Sixteen columns: the lower or upper halves of sixteen bytes.
                first = builder.and_(column, I64(~127))
                place = builder.lshr(builder.and_(column, I64(96)), I64(1))
                octets = ir.VectorType(I8, WIDTH)
                codes = loaded(
                    builder, pointer(builder, blocks, builder.add(builder.shl(first, I64(1)), place)), octets
                )
                shift = builder.trunc(builder.lshr(builder.and_(column, I64(16)), I64(2)), I8)
                codes = builder.and_(builder.lshr(codes, splat(builder, shift, octets)), constant(octets, 15))
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
