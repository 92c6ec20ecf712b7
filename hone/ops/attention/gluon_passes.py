"""Passes before and after the main kernel of the attention backward: row sums, a zeroed dq, the order of tiles; dq rounded."""

import triton
import triton.language as tl


@triton.jit
def _place(count, order, most_long, column, num_columns, heads, share):
    # Writes `column` to its place in the order of its row: first the long columns, which take more than 1 / `share` of all
    # work, then the others, both from left to right.
    total = tl.zeros([256], tl.int64)
    for first in range(0, num_columns, 256):
        at = first + tl.arange(0, 256)
        total += tl.load(count + at, mask=at < num_columns, other=0).to(tl.int64)
    limit = tl.sum(total, 0) * heads // share
    num_long, before = 0, 0
    for first in range(0, num_columns, 256):
        at = first + tl.arange(0, 256)
        long = tl.load(count + at, mask=at < num_columns, other=0) > limit
        num_long += tl.sum(long.to(tl.int32), 0)
        before += tl.sum((long & (at < column)).to(tl.int32), 0)
    place = tl.where(tl.load(count + column) > limit, before, num_long + column - before)
    tl.store(order + place, column)
    if column == 0:
        tl.atomic_max(most_long, num_long)


@triton.jit
def prepare(
    out, d_out, lse, d_lse, stats, dq_sum, counter, q_data, q_count, q_order,
    out_b, out_s, out_h, d_out_b, d_out_s, d_out_h,
    q_data_b, q_data_h, seq_q, num_heads, num_lists, num_n, num_kv, share,
    LISTS: tl.constexpr, HAS_DATA: tl.constexpr, HAS_D_LSE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """stats [B, H, tiles, 2, ROWS] = lse / log 2 and delta = sum(out * d_out) - d_lse; dq_sum [B, H, tiles * ROWS, HEAD_DIM] = 0.

    With HAS_DATA stats have a third row of the same 32 bits as q_data, the mask's int32 of each query.
    lse and d_lse are [B, H, Sq] float32. Rows past the end, and rows without keys (lse -inf), get lse +inf and delta 0:
    their probabilities are exp2(s - inf) = 0. counter int32 [2] = 0. With LISTS q_order int32 [num_lists, num_n] receives
    each list's key tiles, long ones first, and counter[1], 0 before, the largest number of long ones. A tile is long if it
    takes more than 1 / share of the work of all num_kv rows of tiles. Grid: tiles, H, B.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile + h + b == 0:
        tl.store(counter, 0)
    if LISTS:
        program = (b * num_heads + h) * tl.num_programs(0) + tile
        for i in range(program, num_lists * num_n, tl.num_programs(0) * num_heads * tl.num_programs(2)):
            row = (i // num_n).to(tl.int64) * num_n
            _place(q_count + row, q_order + row, counter + 1, i % num_n, num_n, num_kv, share)
    head = (b * num_heads + h).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    inside = rows < seq_q
    at = b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + rows.to(tl.int64)[:, None] * out_s + dims[None, :]
    o = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    at = b.to(tl.int64) * d_out_b + h.to(tl.int64) * d_out_h + rows.to(tl.int64)[:, None] * d_out_s + dims[None, :]
    do = tl.load(d_out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    log = tl.load(lse + head * seq_q + rows, mask=inside, other=float("-inf"))
    if HAS_D_LSE:
        delta -= tl.load(d_lse + head * seq_q + rows, mask=inside, other=0.0)
    seen = log > float("-inf")
    place = stats + (head * tl.num_programs(0) + tile) * (3 if HAS_DATA else 2) * ROWS + tl.arange(0, ROWS)
    tl.store(place, tl.where(seen, log * 1.4426950408889634, float("inf")))
    tl.store(place + ROWS, tl.where(seen, delta, 0.0))
    if HAS_DATA:
        data = tl.load(q_data + b.to(tl.int64) * q_data_b + h.to(tl.int64) * q_data_h + rows, mask=inside, other=0)
        tl.store(place + 2 * ROWS, data.to(tl.float32, bitcast=True))
    zero = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    first = (head * tl.num_programs(0) + tile) * ROWS
    tl.store(dq_sum + (first + tl.arange(0, ROWS))[:, None] * HEAD_DIM + dims[None, :], zero)


@triton.jit
def finish(dq_sum, dq, dq_b, dq_s, dq_h, scale, seq_q, num_heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    """dq [B, Sq, H, HEAD_DIM] = scale * dq_sum [B, H, tiles * ROWS, HEAD_DIM]. Grid: tiles, H, B."""
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = (b * num_heads + h).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    first = (head * tl.num_programs(0) + tile) * ROWS
    total = tl.load(dq_sum + (first + tl.arange(0, ROWS))[:, None] * HEAD_DIM + dims[None, :])
    at = b.to(tl.int64) * dq_b + h.to(tl.int64) * dq_h + rows.to(tl.int64)[:, None] * dq_s + dims[None, :]
    tl.store(dq + at, (total * scale).to(dq.dtype.element_ty), mask=(rows < seq_q)[:, None])
