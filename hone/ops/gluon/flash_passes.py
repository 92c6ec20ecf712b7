"""What the attention backward does before and after its main kernel: row sums, a zeroed dq, and dq's last rounding."""

import triton
import triton.language as tl


@triton.jit
def prepare(
    out, d_out, lse, d_lse, stats, dq_sum, counter,
    out_b, out_s, out_h, d_out_b, d_out_s, d_out_h,
    seq_q, num_heads,
    HAS_D_LSE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """stats [B, H, tiles, 2, ROWS] = lse / log 2 and delta = sum(out * d_out) - d_lse; dq_sum [B, H, tiles * ROWS, HEAD_DIM] = 0.

    lse and d_lse are [B, H, Sq] float32. Rows past the end, and rows that see nothing (lse -inf), get lse +inf and delta 0:
    their probabilities are exp2(s - inf) = 0. counter int32 [1] = 0. Grid: tiles, H, B.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile + h + b == 0:
        tl.store(counter, 0)
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
    place = stats + (head * tl.num_programs(0) + tile) * 2 * ROWS + tl.arange(0, ROWS)
    tl.store(place, tl.where(seen, log * 1.4426950408889634, float("inf")))
    tl.store(place + ROWS, tl.where(seen, delta, 0.0))
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
