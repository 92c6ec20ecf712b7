"""Inner loops of products of dense weights on a CPU, emitted as LLVM: rows of a weight times M rows of x, sums in registers.

With avx512_bf16 pairs of bf16 values are multiplied and added in float32 by one instruction; without it all is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from hone.ops.cpu.vectors import (
    BF16_PAIRS,
    BYTES,
    F32,
    FLOATS,
    I32,
    I64,
    called,
    called_void,
    constant,
    fma,
    loaded,
    pointer,
    total,
    widened,
)

Sums = list[list[Any]]
"""A vector for every row of the weight and every row of x."""


def columns_loop(
    builder: Any, begin: Any, end: Any, step: int, starts: Sums, body: Callable[[Any, Sums], Sums]
) -> Sums:
    """The loop over columns `begin` < `end`: what `body(column, sums)` made of `starts` at last."""
    before = builder.block
    loop, done = builder.append_basic_block("columns"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    column = builder.phi(I64)
    column.add_incoming(begin, before)
    sums = [[builder.phi(start.type) for start in row] for row in starts]
    for row, start_row in zip(sums, starts):
        for one, start in zip(row, start_row):
            one.add_incoming(start, before)
    new = body(column, [list(row) for row in sums])
    following = builder.add(column, I64(step))
    column.add_incoming(following, builder.block)
    for old_row, new_row in zip(sums, new):
        for old, found in zip(old_row, new_row):
            old.add_incoming(found, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)
    return new


def state_of(builder: Any, state: Any, rows: int, count: int, kind: Any = FLOATS) -> tuple[Sums, Sums]:
    """Places and values of the sums f32 [rows, count, 16] at address `state`, of which `kind` may have fewer lanes."""
    places = [[pointer(builder, state, I64(64 * (r * count + m))) for m in range(count)] for r in range(rows)]
    return places, [[loaded(builder, place, kind) for place in row] for row in places]


def keep_state(builder: Any, places: Sums, sums: Sums) -> None:
    """Stores what `state_of` loaded."""
    for place_row, row in zip(places, sums):
        for place, one in zip(place_row, row):
            builder.store(one, builder.bitcast(place, one.type.as_pointer()), align=1)


FETCHED = 4
"""Rows of x from which on weights are asked for before they are needed."""


def fetch(builder: Any, row: Any, offset: Any) -> None:
    """Asks for the 64 bytes at `offset` of a byte pointer."""
    called_void(builder, "llvm.prefetch.p0", builder.gep(row, [offset]), I32(0), I32(3), I32(1))


def dense_tile(stored: str, count: int, *, pairs: bool) -> Any:
    """tile(w, stride, x, x_stride, begin, end, state): state[m] += w . x[m] over columns `begin` ... `end`, `count` rows of x.

    `stored` is the weight's dtype: f32, f16 or bf16. x is bf16 for `pairs`, else f32, its stride in bytes. state f32
    [count, 16]: lanes are added up at the end. One row of the weight at a time: memory is read in sequence, which the
    hardware foresees best; where the arithmetic takes longer than that, the next row, `stride` bytes on, is asked for.
    """

    @intrinsic
    def tile(typing: Any, w: Any, ws: Any, x: Any, xs: Any, begin: Any, end: Any, state: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, ws, x, xs, begin, end, state = args
            inputs = [pointer(builder, x, builder.mul(I64(m), xs)) for m in range(count)]
            places, sums = state_of(builder, state, 1, count)
            step, body = _dense(builder, stored, pairs, [pointer(builder, w)], inputs)

            def fetching(column: Any, sums: Sums) -> Sums:
                fetch(builder, pointer(builder, w, ws), builder.mul(column, I64(BYTES[stored])))
                return body(column, sums)

            body_used = fetching if count >= FETCHED else body
            keep_state(builder, places, columns_loop(builder, begin, end, step, sums, body_used))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), build

    return tile


def score_tile(stored: str, rows: int, count: int, *, pairs: bool) -> Any:
    """tile(w, w_stride, valid, x, x_stride, k, sums): sums[r * count + m] = w[r] . x[m] over `k` columns, scalars.

    As `dense_tile`, with `rows` rows of w. Rows from `valid` on repeat the last one.
    """

    @intrinsic
    def tile(typing: Any, w: Any, ws: Any, valid: Any, x: Any, xs: Any, k: Any, sums: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            w, ws, valid, x, xs, k, sums = args
            last = builder.sub(valid, I64(1))
            places = [builder.select(builder.icmp_signed("<", I64(r), last), I64(r), last) for r in range(rows)]
            weights = [pointer(builder, w, builder.mul(place, ws)) for place in places]
            inputs = [pointer(builder, x, builder.mul(I64(m), xs)) for m in range(count)]
            step, body = _dense(builder, stored, pairs, weights, inputs)
            starts = [[constant(FLOATS, 0.0)] * count for _ in range(rows)]
            found = columns_loop(builder, I64(0), k, step, starts, body)
            for r in range(rows):
                for m in range(count):
                    place = pointer(builder, sums, I64(4 * (r * count + m)))
                    builder.store(total(builder, found[r][m]), builder.bitcast(place, F32.as_pointer()))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), build

    return tile


def _dense(
    builder: Any, stored: str, pairs: bool, weights: list[Any], inputs: list[Any]
) -> tuple[int, Callable[[Any, Sums], Sums]]:
    """Columns of a step of the loop, and its body for rows at the byte pointers `weights` and `inputs`."""

    def at(row: Any, column: Any, size: int) -> Any:
        return builder.gep(row, [builder.mul(column, I64(size))])

    def multiplied(old: Any, x: Any, weight: Any) -> Any:
        if pairs:
            return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, old, x, weight)
        return fma(builder, x, weight, old)

    def body(column: Any, sums: Sums) -> Sums:
        if pairs:
            x = [loaded(builder, at(one, column, 2), BF16_PAIRS) for one in inputs]
        else:
            x = [loaded(builder, at(one, column, 4), FLOATS) for one in inputs]
        for r, row in enumerate(weights):
            if pairs:
                weight = loaded(builder, at(row, column, 2), BF16_PAIRS)
            else:
                weight = widened(builder, at(row, column, BYTES[stored]), stored)
            sums[r] = [multiplied(old, one, weight) for one, old in zip(x, sums[r])]
        return sums

    return 32 if pairs else 16, body
