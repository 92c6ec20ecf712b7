"""The compiled side of programs: one function that runs a table of operations (`program.Program`), called by every thread."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from numba import cfunc, types
from numba.extending import register_jitable

from hone.measure.compilers import compile_without_collections
from hone.ops.cpu import vectors as v
from hone.ops.cpu.family import FIELDS, KINDS, WEIGHTS, Family
from hone.ops.cpu.names import jitable, named
from hone.ops.linear.cpu_codes import codes_tile, quantizer, unpack_row
from hone.ops.linear.cpu_tiles import dense_tile, score_tile
from hone.ops.linear.cpu_weights import ROWS
from hone.ops.paged.cpu_decode import attend_heads

_SPINS = 4000
"""Looks at a counter before a waiting thread lets others run."""

WIDEN, NARROW, OPERAND, NORM, PRODUCT, ROPE, ATTEND, GATE, UNPACK, QUANTIZE = range(len(KINDS))


def interpreter(
    family: Family, kinds: tuple[str, ...], weights: tuple[str, ...], groups: tuple[int, ...], sources: str
) -> Any:
    """The C function void(address of a header): for a family, the kinds of operations that a program has, the formats of
    its weights, and how many query heads share a KV head.

    `sources` is part of its key on disk, on which numba looks only at this file, the code of `run` and its closure. Hence
    `run` finds its parts, whose hashes differ from process to process, among its globals.
    """
    key = f"{family} {kinds} {weights} {groups} {sources}"
    parts = {
        "moves": _moves(family),
        "norm": _norm(family) if "norm" in kinds else _nothing,
        "rope": _rope(family) if "rope" in kinds else _nothing,
        "gate": _gate(family) if "gate" in kinds else _nothing,
        "products": _products(family, weights) if weights else _nothing,
        "attend": _attend(family, groups) if groups else _nothing,
        "unpack": _unpack(family) if "unpack" in kinds else _nothing,
        "quantize": _quantize(family) if "quantize" in kinds else _nothing,
    }

    def run(header):  # type: ignore[no-untyped-def]
        _ = key
        me = v.take(header, 0, 1)
        num_ops, ops = v.get_i64(header, 1), v.get_i64(header, 2)
        scratch = v.get_i64(header, 3) + me * v.get_i64(header, 4)
        rows = v.get_i64(header, 5)
        for place in range(num_ops):
            op = ops + 8 * FIELDS * place
            kind, units = v.get_i64(op, 0), v.get_i64(op, 3)
            if units < 0:
                units = -units * rows
            args = op + 32
            unit = v.take(op, 1, 1)
            while unit < units:
                if kind == PRODUCT:
                    products(args, rows, unit, scratch)  # noqa: F821
                elif kind == NORM:
                    norm(args, unit)  # noqa: F821
                elif kind == ROPE:
                    rope(args, unit, header)  # noqa: F821
                elif kind == ATTEND:
                    attend(args, unit, header, scratch)  # noqa: F821
                elif kind == GATE:
                    gate(args, unit)  # noqa: F821
                elif kind == QUANTIZE:
                    quantize(args, unit)  # noqa: F821
                elif kind == UNPACK:
                    unpack(args, unit)  # noqa: F821
                else:
                    moves(kind, args, unit)  # noqa: F821
                v.take(op, 2, 1)
                unit = v.take(op, 1, 1)
            spins = 0
            while v.seen(op, 2) < units:
                v.pause()
                spins += 1
                if spins > _SPINS:
                    v.give_way()

    compile_without_collections()
    found = named(FunctionType(run.__code__, globals() | parts, "run", None, run.__closure__))
    return cfunc(types.void(types.intp), cache=True, error_model="numpy")(found)


def _operand_store(family: Family) -> Any:
    return v.vector_store("bf16" if family.pairs else "f32")


def _moves(family: Family) -> Any:
    load, store, operand = v.vector_load(family.stored), v.vector_store(family.stored), _operand_store(family)

    @jitable
    def moves(kind, args, row):  # type: ignore[no-untyped-def]
        source, out = v.get_i64(args, 0), v.get_i64(args, 2)
        source_at, out_at = row * v.get_i64(args, 1), row * v.get_i64(args, 3)
        for i in range(0, v.get_i64(args, 4), 16):
            if kind == WIDEN:
                v.store_f32(out, out_at + i, load(source, source_at + i))
            elif kind == NARROW:
                store(out, out_at + i, v.load_f32(source, source_at + i))
            else:
                operand(out, out_at + i, load(source, source_at + i))

    return moves


@register_jitable
def _inverse_rms(x, at, size, eps):  # type: ignore[no-untyped-def]
    """1 / rms of x[at : at + size]."""
    squares = v.broadcast(0.0)
    for i in range(0, size, 16):
        part = v.load_f32(x, at + i)
        squares = v.muladd(part, part, squares)
    return 1.0 / (v.sum_of(squares) / size + eps) ** 0.5


def _norm(family: Family) -> Any:
    operand = _operand_store(family)

    @jitable
    def norm(args, row):  # type: ignore[no-untyped-def]
        x, weight, out, size = v.get_i64(args, 0), v.get_i64(args, 2), v.get_i64(args, 4), v.get_i64(args, 6)
        at, out_at = row * v.get_i64(args, 1), row * v.get_i64(args, 5)
        factor = v.broadcast(_inverse_rms(x, at, size, v.get_f32(v.get_i64(args, 3), 0)))
        for i in range(0, size, 16):
            operand(out, out_at + i, v.mul(v.mul(v.load_f32(x, at + i), factor), v.load_f32(weight, i)))

    return norm


def _gate(family: Family) -> Any:
    operand = _operand_store(family)

    @jitable
    def gate(args, unit):  # type: ignore[no-untyped-def]
        both, out, width, chunk = v.get_i64(args, 0), v.get_i64(args, 2), v.get_i64(args, 4), v.get_i64(args, 5)
        parts = (width + chunk - 1) // chunk
        row, first = unit // parts, unit % parts * chunk
        at, out_at = row * v.get_i64(args, 1), row * v.get_i64(args, 3)
        one, zero = v.broadcast(1.0), v.broadcast(0.0)
        for i in range(first, min(width, first + chunk), 16):
            x = v.load_f32(both, at + i)
            gated = v.div(x, v.add(one, v.exp_of(v.sub(zero, x))))
            operand(out, out_at + i, v.mul(gated, v.load_f32(both, at + width + i)))

    return gate


def _unpack(family: Family) -> Any:
    row, size = unpack_row(family.stored), v.BYTES[family.stored]

    @jitable
    def unpack(args, unit):  # type: ignore[no-untyped-def]
        data, out, features, columns = v.get_i64(args, 0), v.get_i64(args, 2), v.get_i64(args, 4), v.get_i64(args, 5)
        scales, scale_stride, group = v.get_i64(args, 6), v.get_i64(args, 7), v.get_i64(args, 8)
        for n in range(unit * 16, min(features, unit * 16 + 16)):
            at = out + v.get_i64(args, 3) * n * size
            blocks = data + n // ROWS * ROWS * v.get_i64(args, 1) + n % ROWS * 64
            row(blocks, at, columns, scales + n * scale_stride, group)

    return unpack


def _quantize(family: Family) -> Any:
    stored = "bf16" if family.pairs else "f32"
    whole, split = quantizer(stored, split=False), quantizer(stored, split=True)

    @jitable
    def quantize(args, row):  # type: ignore[no-untyped-def]
        x, at, columns = v.get_i64(args, 0), row * v.get_i64(args, 1), v.get_i64(args, 4)
        out = v.get_i64(args, 2) + row * v.get_i64(args, 3)
        if v.get_i64(args, 5) == 0:
            whole(x, at, columns, out)
        else:
            split(x, at, columns, out)

    return quantize


def _rope(family: Family) -> Any:
    operand, store = _operand_store(family), v.vector_store(family.stored)

    @jitable
    def rope(args, row, header):  # type: ignore[no-untyped-def]
        qkv, q = v.get_i64(args, 0), v.get_i64(args, 2)
        at, q_at = row * v.get_i64(args, 1), row * v.get_i64(args, 3)
        heads, kv_heads, dim = v.get_i64(args, 4), v.get_i64(args, 5), v.get_i64(args, 6)
        k_pages, v_pages, page_stride, page_size = (
            v.get_i64(args, 9), v.get_i64(args, 10), v.get_i64(args, 11), v.get_i64(args, 12)
        )  # fmt: skip
        half = dim // 2
        angle = v.get_i64(v.get_i64(header, 6), row) * half
        cos, sin = v.get_i64(args, 7), v.get_i64(args, 8)
        slot = v.get_i64(v.get_i64(header, 7), row) * page_stride + v.get_i64(v.get_i64(header, 8), row) * dim
        eps = v.get_f32(v.get_i64(args, 15), 0)
        for head in range(heads + kv_heads):
            is_query = head < heads
            norm = v.get_i64(args, 13) if is_query else v.get_i64(args, 14)
            begin = at + head * dim
            factor = v.broadcast(1.0)
            if norm != 0:
                factor = v.broadcast(_inverse_rms(qkv, begin, dim, eps))
            for i in range(0, half, 16):
                x, y = v.load_f32(qkv, begin + i), v.load_f32(qkv, begin + half + i)
                if norm != 0:
                    x = v.mul(v.mul(x, factor), v.load_f32(norm, i))
                    y = v.mul(v.mul(y, factor), v.load_f32(norm, half + i))
                c, s = v.load_f32(cos, angle + i), v.load_f32(sin, angle + i)
                first, second = v.sub(v.mul(x, c), v.mul(y, s)), v.muladd(y, c, v.mul(x, s))
                if is_query:
                    operand(q, q_at + head * dim + i, first)
                    operand(q, q_at + head * dim + half + i, second)
                else:
                    place = slot + (head - heads) * page_size * dim
                    store(k_pages, place + i, first)
                    store(k_pages, place + half + i, second)
        for head in range(kv_heads):
            begin = at + (heads + kv_heads + head) * dim
            for i in range(0, dim, 16):
                store(v_pages, slot + head * page_size * dim + i, v.load_f32(qkv, begin + i))

    return rope


HEADS = (1, 2, 4, 8)
"""Query heads that are computed together."""


def _splits(group: int, count: int) -> bool:
    """Whether `group` heads, taken eight at a time, then four, two and one, are taken `count` at a time once."""
    return group >= 8 if count == 8 else bool(group % 8 & count)


def _attend(family: Family, groups: tuple[int, ...]) -> Any:
    size, operand_size, store = v.BYTES[family.stored], 2 if family.pairs else 4, _operand_store(family)
    counts = {count for group in groups for count in HEADS if _splits(group, count)}
    one, two, four, eight = (
        attend_heads(family.stored, count, score_tile(family.stored, 4, count, pairs=family.pairs), store)
        if count in counts else _nothing
        for count in HEADS
    )  # fmt: skip

    @jitable
    def attend(args, unit, header, scratch):  # type: ignore[no-untyped-def]
        q, heads, kv_heads, dim = v.get_i64(args, 0), v.get_i64(args, 2), v.get_i64(args, 3), v.get_i64(args, 4)
        row, kv_head = unit // kv_heads, unit % kv_heads
        page_stride, page_size = size * v.get_i64(args, 7), v.get_i64(args, 8)
        k_pages = v.get_i64(args, 5) + size * kv_head * page_size * dim
        v_pages = v.get_i64(args, 6) + size * kv_head * page_size * dim
        scale, window = v.get_f32(v.get_i64(args, 9), 0), v.get_i64(args, 10)
        table = v.get_i64(header, 10) + 4 * row * v.get_i64(header, 11)
        end = v.get_i32(v.get_i64(header, 9), row) + 0
        begin = 0
        if window > 0 and end > window:
            begin = end - window
        group = heads // kv_heads
        done = 0
        while done < group:
            left, head = group - done, kv_head * group + done
            queries = q + operand_size * (row * v.get_i64(args, 1) + head * dim)
            out = v.get_i64(args, 11) + operand_size * (row * v.get_i64(args, 12) + head * dim)
            stride = operand_size * dim
            rest = (
                queries,
                stride,
                k_pages,
                v_pages,
                page_stride,
                table,
                begin,
                end,
                page_size,
                dim,
                scale,
                out,
                scratch,
            )
            if left >= 8:
                eight(*rest)
                done += 8
            elif left >= 4:
                four(*rest)
                done += 4
            elif left >= 2:
                two(*rest)
                done += 2
            else:
                one(*rest)
                done += 1

    return attend


def _products(family: Family, weights: tuple[str, ...]) -> Any:
    """The products of a program: those of formats that it does not have are compiled as nothing."""
    dense, i8, i8g, i4, i4s = (
        _product(family, family.stored if name == "dense" else name) if name in weights else _nothing for name in WEIGHTS
    )  # fmt: skip

    @jitable
    def products(args, rows, unit, scratch):  # type: ignore[no-untyped-def]
        stored = v.get_i64(args, 0)
        if stored == 0:
            dense(args, rows, unit, scratch)
        elif stored == 1:
            i8(args, rows, unit, scratch)
        elif stored == 2:
            i8g(args, rows, unit, scratch)
        elif stored == 3:
            i4(args, rows, unit, scratch)
        else:
            i4s(args, rows, unit, scratch)

    return products


@register_jitable
def _nothing(*args):  # type: ignore[no-untyped-def]
    pass


_X_BYTES = 1 << 14
"""Bytes of the rows of x that products read together: half of a core's first cache."""
_SUMS = 128
"""Sums of a thread that are unfinished at a time, 64 bytes each."""


def _product(family: Family, stored: str) -> Any:
    """The product of one chunk of a weight's rows with all rows of x.

    Rows of x go together in powers of two; where they exceed the first cache, columns are taken in pieces that do not.
    """
    coded = stored in WEIGHTS[1:]
    blocked = stored in ("i4", "i4s")
    x_size = 2 if coded or family.pairs else 4
    most = 8 if family.isa != "avx2" else 4
    one, two, four, eight = (_tile(family, stored, count) if count <= most else _nothing for count in HEADS)
    together = {count: _together(stored, count) for count in HEADS}
    rows1, rows2, rows4, rows8 = (together[count] for count in HEADS)

    @jitable
    def product(args, rows, unit, scratch):  # type: ignore[no-untyped-def]
        data, stride, features, chunk = (
            v.get_i64(args, 1), v.get_i64(args, 2), v.get_i64(args, 3), v.get_i64(args, 4)
        )  # fmt: skip
        x, x_stride, columns = v.get_i64(args, 5), v.get_i64(args, 6), v.get_i64(args, 7)
        scales, scale_stride, group = v.get_i64(args, 8), v.get_i64(args, 9), v.get_i64(args, 10)
        end = min(features, (unit + 1) * chunk)
        m = 0
        while m < rows:
            left, at = rows - m, x + m * x_stride
            if most == 8 and left >= 8:
                count, step = 8, rows8
            elif left >= 4:
                count, step = 4, rows4
            elif left >= 2:
                count, step = 2, rows2
            else:
                count, step = 1, rows1
            width = _X_BYTES // (count * x_size)
            for low in range(unit * chunk, end, _SUMS // count):
                high = min(end, low + _SUMS // count)
                for i in range((high - low + ROWS) * count):
                    v.store_f32(scratch, 16 * i, v.broadcast(0.0))
                for begin in range(0, columns, width):
                    stop = min(columns, begin + width)
                    for first in range(low, high, step):
                        w = data + first * stride
                        if blocked:
                            w = data + first // ROWS * ROWS * stride + first % ROWS * 64
                        state = scratch + (first - low) * count * 64
                        s = scales + first * scale_stride
                        rest = (w, stride, at, x_stride, columns, begin, stop, s, scale_stride, group, state)
                        if most == 8 and count == 8:
                            eight(*rest)
                        elif count == 4:
                            four(*rest)
                        elif count == 2:
                            two(*rest)
                        else:
                            one(*rest)
                _finish(args, low, high, m, count, coded, scratch)
            m += count

    return product


def _together(stored: str, count: int) -> int:
    """Rows of a weight that are read together: those whose codes alternate, as many as registers hold sums of."""
    return {1: ROWS, 2: ROWS, 4: 2, 8: 1}[count] if stored in ("i4", "i4s") else 1


def _tile(family: Family, stored: str, count: int) -> Any:
    """One signature for the tiles of all formats."""
    if stored in WEIGHTS[1:]:
        codes = codes_tile(stored, _together(stored, count), count, family.isa)

        @jitable
        def tile(w, stride, x, x_stride, columns, begin, end, scales, scale_stride, group, state):  # type: ignore[no-untyped-def]
            codes(w, stride, x, x_stride, x + 2 * columns, begin, end, scales, scale_stride, group, state)

        return tile
    dense = dense_tile(stored, count, pairs=family.pairs)

    @jitable
    def tile(w, stride, x, x_stride, columns, begin, end, scales, scale_stride, group, state):  # type: ignore[no-untyped-def]
        dense(w, stride, x, x_stride, begin, end, state)

    return tile


@register_jitable
def _finish(args, low, high, m, count, coded, state):  # type: ignore[no-untyped-def]
    """Outputs of rows `low` ... `high` of the weight for `count` rows of x from m, from their sums."""
    x, x_stride, columns = v.get_i64(args, 5), v.get_i64(args, 6), v.get_i64(args, 7)
    row_scales, bias, out, out_stride, onto = (
        v.get_i64(args, 11), v.get_i64(args, 12), v.get_i64(args, 13), v.get_i64(args, 14), v.get_i64(args, 15)
    )  # fmt: skip
    x_scales = x + m * x_stride + 2 * columns + columns // 2
    for feature in range(low, high):
        scale, shift = 1.0, 0.0
        if row_scales != 0:
            scale = v.get_f32(row_scales, feature)
        if bias != 0:
            shift = v.get_f32(bias, feature)
        for i in range(count):
            factor = scale
            if coded:
                factor *= v.get_f32(x_scales + i * x_stride, 0)
            place = (m + i) * out_stride + feature
            y = v.sum_of(v.load_f32(state, 16 * ((feature - low) * count + i))) * factor + shift
            if onto != 0:
                y += v.get_f32(out, place)
            v.put_f32(out, place, y)
