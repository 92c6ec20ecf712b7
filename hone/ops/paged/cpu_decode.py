"""Attention of one new token a sequence over pages on a CPU, read in place: the part of a compiled step for one KV head.

Scores of a block of keys, their exponentials with a running maximum, and the weighted sum of values (Milakov and
Gimelshein 2018, arXiv:1805.02867). The G query heads of a KV head go together in powers of two, so that keys and values
are converted once for up to 8 of them.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from hone.ops.cpu import vectors as v
from hone.ops.cpu.names import jitable
from hone.ops.cpu.vectors import BYTES, F32, FLOATS, I64, constant, fma, loaded, pointer, splat, widened

KEYS = 256
"""Keys of a block, whose scores are kept (`program.scratch_bytes`)."""
_LOWEST = -1e30


def weighted_sum(stored: str, count: int) -> Any:
    """mix(values, stride, keys, p, acc, acc_stride): acc[m, :32] += sum of p[t, m] values[t, :32] for `count` heads m.

    p f32 [keys, count]; acc f32; strides in bytes.
    """

    @intrinsic
    def mix(typing: Any, values: Any, stride: Any, keys: Any, p: Any, acc: Any, acc_stride: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, stride, keys, p, acc, acc_stride = args
            places = [
                [pointer(builder, acc, builder.add(builder.mul(I64(m), acc_stride), I64(64 * half))) for half in (0, 1)]
                for m in range(count)
            ]
            before = builder.block
            loop, done = builder.append_basic_block("keys"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            t = builder.phi(I64)
            t.add_incoming(I64(0), before)
            sums = [[builder.phi(FLOATS) for _ in pair] for pair in places]
            row = pointer(builder, values, builder.mul(t, stride))
            halves = [widened(builder, builder.gep(row, [I64(16 * half * BYTES[stored])]), stored) for half in (0, 1)]
            found = []
            for m, pair in enumerate(sums):
                at = builder.add(builder.mul(t, I64(4 * count)), I64(4 * m))
                one = splat(builder, loaded(builder, pointer(builder, p, at), F32))
                found.append([fma(builder, one, half, old) for half, old in zip(halves, pair)])
                for old, new in zip(pair, found[-1]):
                    old.add_incoming(constant(FLOATS, 0.0), before)
                    old.add_incoming(new, loop)
            following = builder.add(t, I64(1))
            t.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, keys), loop, done)
            builder.position_at_end(done)
            for pair, new in zip(places, found):
                for place, value in zip(pair, new):
                    both = builder.fadd(loaded(builder, place, FLOATS), value)
                    builder.store(both, builder.bitcast(place, FLOATS.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), build

    return mix


def attend_heads(stored: str, count: int, tile: Any, store: Any) -> Any:
    """The kernel of `count` query heads that share a KV head, `tile` their product with 4 keys (`cpu_tiles.score_tile`).

    `store` writes the result: the activations' dtype.
    """
    mix = weighted_sum(stored, count)
    size = BYTES[stored]

    @jitable
    def attend(q, q_stride, k_pages, v_pages, page_stride, table, begin, end, page_size, dim, scale, out, scratch):  # type: ignore[no-untyped-def]
        """q, out: the first of the heads. k_pages, v_pages: this KV head's part of page 0. table int32: the sequence's pages."""
        scores = scratch
        acc = scratch + 4 * (KEYS + 16) * count
        highs = acc + 4 * count * dim
        lows = highs + 64
        for i in range(0, count * dim, 16):
            v.store_f32(acc, i, v.broadcast(0.0))
        high = v.broadcast(_LOWEST)
        sums = v.broadcast(0.0)
        for first in range(begin, end, KEYS):
            stop = min(end, first + KEYS)
            t = first
            while t < stop:
                slot = t % page_size
                most = min(page_size - slot, stop - t)
                place = k_pages + v.get_i32(table, t // page_size) * page_stride + slot * dim * size
                for s in range(0, most, 4):
                    tile(
                        place + s * dim * size, dim * size, most - s, q, q_stride, dim,
                        scores + 4 * count * (t - first + s),
                    )  # fmt: skip
                t += most
            total = (stop - first) * count
            for i in range(total, (total + 15) // 16 * 16):
                v.put_f32(scores, i, _LOWEST)
            new = high
            for i in range(0, total, 16):
                scaled = v.mul(v.load_f32(scores, i), v.broadcast(scale))
                v.store_f32(scores, i, scaled)
                new = v.larger(new, scaled)
            v.store_f32(highs, 0, new)  # lane l belongs to head l % count: the highest of each head, in all its lanes
            for m in range(count):
                top = v.get_f32(highs, m)
                for i in range(m, 16, count):
                    top = max(top, v.get_f32(highs, i))
                for i in range(m, 16, count):
                    v.put_f32(highs, i, top)
            new = v.load_f32(highs, 0)
            shrink = v.exp_of(v.sub(high, new))
            sums = v.mul(sums, shrink)
            if first > begin:
                v.store_f32(lows, 0, shrink)
                for m in range(count):
                    factor = v.broadcast(v.get_f32(lows, m))
                    for i in range(m * dim, (m + 1) * dim, 16):
                        v.store_f32(acc, i, v.mul(v.load_f32(acc, i), factor))
            high = new
            for i in range(0, total, 16):
                p = v.exp_of(v.sub(v.load_f32(scores, i), high))
                v.store_f32(scores, i, p)
                sums = v.add(sums, p)
            t = first
            while t < stop:
                slot = t % page_size
                most = min(page_size - slot, stop - t)
                place = v_pages + v.get_i32(table, t // page_size) * page_stride + slot * dim * size
                for d in range(0, dim, 32):
                    mix(place + d * size, dim * size, most, scores + 4 * count * (t - first), acc + 4 * d, 4 * dim)
                t += most
        v.store_f32(highs, 0, sums)
        for m in range(count):
            total_p = v.get_f32(highs, m)
            for i in range(m + count, 16, count):
                total_p += v.get_f32(highs, i)
            factor = v.broadcast(1.0 / total_p)
            for d in range(0, dim, 16):
                store(out, m * dim + d, v.mul(v.load_f32(acc, m * dim + d), factor))

    return attend
