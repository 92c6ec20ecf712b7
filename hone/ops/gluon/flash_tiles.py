"""The parts of the Hopper attention forward: which tile comes next, masks, a step of online softmax, the way out.

Sources: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) for the two warpgroups that take turns and the softmax that
runs under the products; FlashAttention-4 (2026) for leaving the sums unscaled while a maximum hardly moves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from hone.ops.compat import aggregate, named_barrier_arrive, named_barrier_sync, tma_store

LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)
"""Where a row's maximum begins: finite, so that a row without any key gives 0 and not NaN."""


@aggregate
class Plan:
    """What a launch works on: sizes, the order of its tiles, its mask. KIND is "causal", "full" or "lists"."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    heads: gl.tensor
    num_m: gl.tensor
    num_n: gl.tensor
    num_tiles: gl.tensor
    span: gl.tensor
    kv_count: gl.tensor
    kv_index: gl.tensor
    kv_partial: gl.tensor
    list_batch: gl.tensor
    list_head: gl.tensor
    q_data: gl.tensor
    q_batch: gl.tensor
    q_head: gl.tensor
    k_data: gl.tensor
    k_batch: gl.tensor
    k_head: gl.tensor
    scale_log2: gl.tensor
    cap: gl.tensor
    cap_log2: gl.tensor
    KIND: gl.constexpr
    RULE: gl.constexpr
    PARAMS: gl.constexpr
    DATA: gl.constexpr
    GROUP: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    CAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, seq_q, seq_k, heads, num_m, num_n, num_tiles, span, kv_count, kv_index, kv_partial, list_batch, list_head,
        q_data, q_batch, q_head, k_data, k_batch, k_head, scale_log2, cap, cap_log2, KIND, RULE, PARAMS, DATA, GROUP,
        BM, BN, CAP,
    ):  # fmt: skip
        self.seq_q = seq_q
        self.seq_k = seq_k
        self.heads = heads
        self.num_m = num_m
        self.num_n = num_n
        self.num_tiles = num_tiles
        self.span = span
        self.kv_count = kv_count
        self.kv_index = kv_index
        self.kv_partial = kv_partial
        self.list_batch = list_batch
        self.list_head = list_head
        self.q_data = q_data
        self.q_batch = q_batch
        self.q_head = q_head
        self.k_data = k_data
        self.k_batch = k_batch
        self.k_head = k_head
        self.scale_log2 = scale_log2
        self.cap = cap
        self.cap_log2 = cap_log2
        self.KIND = gl.constexpr(KIND)
        self.RULE = gl.constexpr(RULE)
        self.PARAMS = gl.constexpr(PARAMS)
        self.DATA = gl.constexpr(DATA)
        self.GROUP = gl.constexpr(GROUP)
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.CAP = gl.constexpr(CAP)


@aggregate
class Tile:
    """BM queries of one head: where they are and how many tiles of keys they meet, the first `partial` of them masked."""

    batch: gl.tensor
    head: gl.tensor
    m: gl.tensor
    count: gl.tensor
    partial: gl.tensor
    at: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, m, count, partial, at):
        self.batch = batch
        self.head = head
        self.m = m
        self.count = count
        self.partial = partial
        self.at = at


@gluon.jit
def tile_at(plan, t, SNAKE: gl.constexpr):
    """The t-th tile of this launch.

    Causal tiles go longest first through `span` heads at once, whose keys and values stay in L2 together, and every other
    round runs backwards through the programs, so that each gets as many long tiles as short ones.
    """
    if plan.KIND == "causal":
        programs = gl.num_programs(0)
        turn = t // programs if SNAKE else 0
        if (turn % 2 == 1) & ((turn + 1) * programs <= plan.num_tiles):
            t = turn * programs + (programs - 1 - t % programs)
        within = plan.num_m * plan.span
        first = t // within * plan.span
        wide = gl.minimum(plan.span, plan.num_tiles // plan.num_m - first)
        rest = t % within
        m = plan.num_m - 1 - rest // wide
        row = first + rest % wide
    else:
        m = t % plan.num_m
        row = t // plan.num_m
    batch = row // plan.heads
    head = row % plan.heads
    if plan.KIND == "lists":
        at = batch * plan.list_batch + head * plan.list_head + m
        count = gl.load(plan.kv_count + at)
        # A tile that sees nothing goes through one tile of keys, all of it masked.
        partial = gl.where(count > 0, gl.load(plan.kv_partial + at), 1)
        at = gl.where(count > 0, at * plan.num_n, -1)
        count = gl.maximum(count, 1)
    elif plan.KIND == "causal":
        at = m * 0
        place = m * plan.BM + plan.seq_k - plan.seq_q
        count = gl.cdiv(gl.maximum(gl.minimum(plan.seq_k, place + plan.BM), 1), plan.BN)
        partial = gl.maximum(count - gl.maximum(place + 1, 0) // plan.BN, 0)
    else:
        at = m * 0
        count = gl.cdiv(plan.seq_k, plan.BN)
        partial = gl.where(plan.seq_k % plan.BN == 0, 0, 1)
    return Tile(batch, head, m, count, partial, at)


@gluon.jit
def keys_at(plan, tile, j):
    """The j-th tile of keys that a tile of queries meets; without lists from the right to the left."""
    n = tile.count - 1 - j
    if plan.KIND == "lists":
        n = gl.load(plan.kv_index + tile.at + j, mask=tile.at >= 0, other=0)
    return n


@gluon.jit
def _axis(N: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """0 ... N - 1 along AXIS of four, length 1 along the others."""
    if AXIS == 0:
        line = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[:, None, None, None]
    elif AXIS == 1:
        line = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    elif AXIS == 2:
        line = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    else:
        line = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    return line


@gluon.jit
def masked(s, plan, tile, n, PART: gl.constexpr):
    """Scores [64, BN] of warpgroup PART's rows against the n-th tile of keys, -inf where the mask does not let them through.

    Columns are seen as [BN / 8, 4, 2]: the first is a register's number and so an immediate operand, the others a thread's.
    """
    BN: gl.constexpr = plan.BN
    wide = s.reshape([64, BN // 8, 4, 2])
    layout: gl.constexpr = wide.type.layout
    rows = tile.m * plan.BM + PART * 64 + _axis(64, 0, layout)
    places = rows + (plan.seq_k - plan.seq_q)
    # Opaque, so that no sum of the two parts of a column is kept in a register through the loop around this.
    mine = (
        gl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [_axis(4, 2, layout) * 2 + _axis(2, 3, layout)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        + n * BN
    )
    eights = _axis(BN // 8, 1, layout) * 8
    if plan.KIND == "causal":
        keep = eights <= places - mine
    elif plan.KIND == "full":
        keep = eights < plan.seq_k - mine
    else:
        columns = eights + mine
        inside = columns < plan.seq_k
        q_data = 0
        k_data = 0
        if plan.DATA[0]:
            data = plan.q_data + tile.batch * plan.q_batch + tile.head * plan.q_head
            q_data = gl.load(data + rows, mask=rows < plan.seq_q, other=0)
        if plan.DATA[1]:
            data = plan.k_data + tile.batch * plan.k_batch + tile.head * plan.k_head
            k_data = gl.load(data + columns, mask=inside, other=0)
        keep = plan.RULE(places, columns, q_data, k_data, plan.PARAMS) & inside & (tile.at >= 0)
    return gl.convert_layout(gl.where(keep, wide, float("-inf")).reshape([64, BN]), s.type.layout)


@gluon.jit
def capped(s, plan):
    """cap * tanh(s * scale / cap) where the launch has a softcap, as 1 - 2 / (1 + e^2x): exact to float32's rounding."""
    if plan.CAP:
        s = plan.cap - 2.0 * plan.cap / (1.0 + gl.exp2(s * plan.cap_log2))
    return s


@gluon.constexpr_function
def _mixed_exponentials(emulated):
    """Assembly for 2^x of 8 numbers, `emulated` of them by range reduction and a cubic that is right to 7.5e-5."""
    lines = ["{ .reg .f32 x, t, f, y; .reg .b32 n;"]
    for i in range(8):
        if (i * emulated) % 8 < emulated:
            lines += [
                f"max.f32 x, ${8 + i}, 0fC2FE0000;",
                "add.rn.f32 t, x, 0f4B400000;",
                "sub.rn.f32 f, t, 0f4B400000;",
                "sub.rn.f32 f, x, f;",
                "fma.rn.f32 y, f, 0f3D61FB63, 0f3E786F13;",
                "fma.rn.f32 y, y, f, 0f3F31798E;",
                "fma.rn.f32 y, y, f, 0f3F7FFB49;",
                "mov.b32 n, t;",
                "shl.b32 n, n, 23;",
                f"{{ .reg .b32 m; mov.b32 m, y; add.s32 n, n, m; mov.b32 ${i}, n; }}",
            ]
        else:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${8 + i};")
    return " ".join([*lines, "}"])


@gluon.jit
def exponentials(s, top, EMULATE: gl.constexpr):
    """2^(s - top), EMULATE of 8 of them by a polynomial on the multiply-add units, which have time left."""
    x = s - top
    if EMULATE:
        asm: gl.constexpr = _mixed_exponentials(EMULATE)
        y = gl.inline_asm_elementwise(
            asm, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=8
        )
    else:
        y = gl.exp2(x)
    return y


@gluon.jit
def row_sums(p, DEFER: gl.constexpr):
    """Sums of p's rows; deferred: [64, 4], one share for each of the four threads that hold a row."""
    if DEFER:
        quads = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
        sums = gl.sum(gl.sum(quads, 3), 1)
    else:
        sums = gl.sum(p, 1)
    return sums


@gluon.jit
def begin_rows(s, scale, EMULATE: gl.constexpr, DEFER: gl.constexpr):
    """The first tile of a row: its maxima, its weights against them, their sums."""
    m = gl.maximum(gl.max(s, 1), LOWEST)
    p = exponentials(s * scale, (m * scale)[:, None], EMULATE)
    return m, p, row_sums(p, DEFER)


@gluon.jit
def extend_rows(s, m, total, scale, EMULATE: gl.constexpr, DEFER: gl.constexpr, SKIP: gl.constexpr):
    """One more tile: new maxima, weights, sums, and what the accumulator must be multiplied by."""
    top = gl.maximum(gl.max(s, 1), m)
    if SKIP:
        # A maximum moves only when it must: weights up to 2^8 are as exact, and most tiles then need no rescaling.
        top = gl.where((top - m) * scale > 8.0, top, m)
    p = exponentials(s * scale, (top * scale)[:, None], EMULATE)
    alpha = gl.exp2((m - top) * scale)
    if DEFER:
        total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None] + row_sums(p, DEFER)
    else:
        total = total * alpha + row_sums(p, DEFER)
    return top, p, total, alpha


@gluon.jit
def declare_flag(PART: gl.constexpr):
    """Names the predicate that `any_above` sets; once a warpgroup, before its loops."""
    gl.inline_asm_elementwise(
        ".reg .pred hone_above_%d; mov.u32 $0, 0;" % PART, "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def any_above(sums, PART: gl.constexpr):
    """Whether any of the warpgroup's partial sums is above 2^12 (or no number): a barrier of its 128 threads that votes."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gtu.f32 p, $2, 0f45800000; setp.gtu.or.f32 p, $3, 0f45800000, p; "
        + "bar.red.or.pred hone_above_%d" % PART
        + ", %d, 128, p; mov.b32 $0, 0; mov.b32 $1, 0; }" % (11 + PART),
        "=f,=f,f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )
    flag = gl.inline_asm_elementwise(
        "selp.b32 $0, 1, 0, hone_above_%d;" % PART, "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return flag != 0


@gluon.jit
def extend_rows_lazily(s, m, total, scale, before, EMULATE: gl.constexpr, DEFER: gl.constexpr, PART: gl.constexpr):
    """`extend_rows` that keeps the old maxima, and so looks for none, unless a sum of weights against them gets large.

    Weights up to 2^12 are as exact as those up to 1. Returns what extend_rows does, the weights in `dtype`.
    """
    weights = exponentials(s * scale, (m * scale)[:, None], EMULATE)
    sums = row_sums(weights, DEFER)
    p = gl.convert_layout(weights.to(before.dtype), before.type.layout)
    alpha = m * 0.0 + 1.0
    if any_above(sums, PART):
        top = gl.maximum(gl.max(s, 1), m)
        weights = gl.exp2(s * scale - (top * scale)[:, None])
        sums = row_sums(weights, DEFER)
        p = gl.convert_layout(weights.to(before.dtype), before.type.layout)
        alpha = gl.exp2((m - top) * scale)
        m = top
    if DEFER:
        total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None] + sums
    else:
        total = total * alpha + sums
    return m, p, total, alpha


@gluon.jit
def pinned(total):
    """`total` unchanged, but nothing after it in the program begins before it is known.

    ptxas moves the wait for a product up over arithmetic that does not need it, and the softmax would no longer run under
    the product. It moves no wait over a barrier, even one that is never arrived at (no sum is negative).
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p bar.arrive 15, 32; mov.b32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def rescaled(acc, alpha):
    """acc [64, Dv] times alpha [64] by rows."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.constexpr_function
def _scale_if_moved(count):
    """Assembly that multiplies `count` numbers by their factors unless all factors of the warp are 1; and its constraints."""
    # An accumulator's registers go in turns of two through the two rows that a thread has a part of.
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * count}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        *(f"mov.b32 ${i}, ${count + i};" for i in range(count)),
        "@!q bra.uni DONE_${:uid};",
        *(f"mul.f32 ${i}, ${i}, ${2 * count + i % 4};" for i in range(count)),
        "DONE_${:uid}: }",
    ]
    return " ".join(lines)


@gluon.jit
def rescaled_if_moved(acc, alpha):
    """`rescaled`, but a warp all of whose maxima stayed goes around the multiplications."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    factors, acc = gl.broadcast(factors, acc)
    asm: gl.constexpr = _scale_if_moved(COUNT)
    constraints: gl.constexpr = _constraints(COUNT)
    return gl.inline_asm_elementwise(asm, constraints, [acc, factors], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _constraints(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def finish_rows(acc, m, total, o_desc, o_shared, lse, plan, tile, PART: gl.constexpr, DEFER: gl.constexpr):
    """Divides by the sums and stores out and lse of warpgroup PART's 64 rows."""
    if DEFER:
        sums = gl.convert_layout(gl.sum(total, 1), m.type.layout)
    else:
        sums = total
    seen = sums > 0.0
    acc = rescaled(acc, gl.where(seen, 1.0 / sums, 0.0))
    rows = tile.m * plan.BM + PART * 64 + gl.arange(0, 64, m.type.layout)
    base = (tile.batch * plan.heads + tile.head).to(gl.int64) * plan.seq_q
    value = gl.where(seen, (m * plan.scale_log2 + gl.log2(sums)) * LN2, float("-inf"))
    gl.store(lse + base + rows, value, mask=rows < plan.seq_q)
    tma.store_wait(0)
    stage = o_shared.index(PART)
    stage.reshape([64, acc.shape[1]]).store(acc.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [tile.batch, tile.m * plan.BM + PART * 64, tile.head, 0], stage)


@gluon.jit
def take_turn(PART: gl.constexpr, PARTS: gl.constexpr):
    """Waits until the warpgroup before this one has issued its products."""
    if PARTS > 1:
        named_barrier_sync(8 + PART, 256)


@gluon.jit
def pass_turn(PART: gl.constexpr, PARTS: gl.constexpr):
    """Lets the next warpgroup issue its products."""
    if PARTS > 1:
        named_barrier_arrive(8 + (PART + 1) % PARTS, 256)
