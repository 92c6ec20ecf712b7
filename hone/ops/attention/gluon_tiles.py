"""Parts of the Hopper attention forward: the order of tiles, masks, a step of online softmax, the stores.

Sources: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) for two alternating warpgroups and the softmax that overlaps
the products; FlashAttention-4 (2026) for skipping the rescaling while a maximum hardly changes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from hone.ops.compat import aggregate, named_barrier_arrive, named_barrier_sync, tma_store

LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)
"""Initial maximum of a row: finite, so that a row without keys gives 0 and not NaN."""


@aggregate
class Plan:
    """The problem of a launch: sizes, the order of its tiles, its mask. KIND is "causal", "full", "lists", or
    "paged" (`hone.ops.paged.gluon_prefill`)."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    heads: gl.tensor
    num_m: gl.tensor
    num_n: gl.tensor
    num_tiles: gl.tensor
    span: gl.tensor
    order: gl.tensor
    kv_index: gl.tensor
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
    RANGE: gl.constexpr
    PARAMS: gl.constexpr
    DATA: gl.constexpr
    GROUP: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    CAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, seq_q, seq_k, heads, num_m, num_n, num_tiles, span, order, kv_index, list_batch, list_head,
        q_data, q_batch, q_head, k_data, k_batch, k_head, scale_log2, cap, cap_log2, KIND, RULE, RANGE, PARAMS, DATA,
        GROUP, BM, BN, CAP,
    ):  # fmt: skip
        self.seq_q = seq_q
        self.seq_k = seq_k
        self.heads = heads
        self.num_m = num_m
        self.num_n = num_n
        self.num_tiles = num_tiles
        self.span = span
        self.order = order
        self.kv_index = kv_index
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
        self.RANGE = gl.constexpr(RANGE)
        self.PARAMS = gl.constexpr(PARAMS)
        self.DATA = gl.constexpr(DATA)
        self.GROUP = gl.constexpr(GROUP)
        self.BM = gl.constexpr(BM)
        self.BN = gl.constexpr(BN)
        self.CAP = gl.constexpr(CAP)


@aggregate
class Tile:
    """BM queries of one head: their position and the number of their tiles of keys, the first `partial` of them masked.

    `first` is the first of these tiles of keys, `at` the start of their list, -1 for queries without keys: these compute
    one fully masked tile of keys. `count` is 0 after the launch's last tile.
    """

    batch: gl.tensor
    head: gl.tensor
    m: gl.tensor
    count: gl.tensor
    partial: gl.tensor
    at: gl.tensor
    first: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, m, count, partial, at, first):
        self.batch = batch
        self.head = head
        self.m = m
        self.count = count
        self.partial = partial
        self.at = at
        self.first = first


@gluon.jit
def tile_at(plan, t):
    """The t-th tile of this launch.

    Tiles of unequal lengths alternate over `span` heads, the longest first under a causal mask and in the order of the
    lists: the programs end together, and concurrent programs share keys and values in L2.
    """
    live = t < plan.num_tiles
    t = gl.minimum(t, plan.num_tiles - 1)
    if plan.KIND == "full":
        m = t % plan.num_m
        row = t // plan.num_m
    else:
        within = plan.num_m * plan.span
        group = t // within * plan.span
        wide = gl.minimum(plan.span, plan.num_tiles // plan.num_m - group)
        rest = t % within
        m = plan.num_m - 1 - rest // wide
        row = group + rest % wide
    batch = row // plan.heads
    head = row % plan.heads
    if plan.KIND == "lists":
        start = batch * plan.list_batch + head * plan.list_head
        # `Tiles.kv_turns`.
        record = plan.order + 4 * (start + plan.num_m - 1 - m)
        m = gl.load(record)
        count = gl.load(record + 1)
        partial = gl.where(count > 0, gl.load(record + 2), 1)
        first = gl.load(record + 3)
        at = gl.where(count > 0, (start + m) * plan.num_n, -1)
        count = gl.maximum(count, 1)
    elif plan.KIND == "causal":
        at = m * 0
        place = m * plan.BM + plan.seq_k - plan.seq_q
        count = gl.cdiv(gl.maximum(gl.minimum(plan.seq_k, place + plan.BM), 1), plan.BN)
        partial = gl.maximum(count - gl.maximum(place + 1, 0) // plan.BN, 0)
        first = count - 1
    else:
        at = m * 0
        count = gl.cdiv(plan.seq_k, plan.BN)
        partial = gl.where(plan.seq_k % plan.BN == 0, 0, 1)
        first = count - 1
    return Tile(batch, head, m, gl.where(live, count, 0), partial, at, first)


@gluon.jit
def keys_at(plan, tile, j, end):
    """The j-th tile of keys (not the first) of a tile of queries, for j below `end`; without lists right to left."""
    n = tile.count - 1 - j
    if plan.KIND == "lists":
        n = gl.load(plan.kv_index + tile.at + j, mask=j < end, other=0)
    return n


@gluon.jit
def query_data(plan, tile, PART: gl.constexpr, layout: gl.constexpr):
    """The mask's int32 of warpgroup PART's rows [64]; loaded early to hide the latency."""
    numbers = gl.zeros([64], gl.int32, layout)
    if plan.DATA[0]:
        rows = tile.m * plan.BM + PART * 64 + gl.arange(0, 64, layout)
        data = plan.q_data + tile.batch * plan.q_batch + tile.head * plan.q_head
        numbers = gl.load(data + rows, mask=rows < plan.seq_q, other=0)
    return numbers


@gluon.jit
def _axis(N: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):
    """0 ... N - 1 along AXIS of four axes, length 1 along the others."""
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
def masked(s, plan, tile, n, numbers, PART: gl.constexpr):
    """Scores [64, BN] of warpgroup PART's rows against the n-th tile of keys, -inf where the mask excludes them.

    `numbers` is their `query_data`.

    Columns have the shape [BN / 8, 4, 2]: the first axis is a register's number, so an immediate operand, the others a thread's.
    """
    BN: gl.constexpr = plan.BN
    wide = s.reshape([64, BN // 8, 4, 2])
    layout: gl.constexpr = wide.type.layout
    rows = PART * 64 + _axis(64, 0, layout)
    if plan.KIND == "paged":
        places = tile.at + rows // plan.GROUP
    else:
        places = tile.m * plan.BM + rows + (plan.seq_k - plan.seq_q)
    # Opaque, so that the compiler does not keep sums of the two parts of a column in registers through the outer loop.
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
    if plan.KIND == "causal" or plan.KIND == "paged":
        keep = eights <= places - mine
    elif plan.KIND == "full":
        keep = eights < plan.seq_k - mine
    else:
        limit = gl.where(tile.at >= 0, plan.seq_k, 0)
        q_data = 0
        k_data = 0
        if plan.DATA[0]:
            q_data = gl.convert_layout(numbers, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
            q_data = q_data[:, None, None, None]
        if plan.RANGE is None and plan.DATA[1]:
            data = plan.k_data + tile.batch * plan.k_batch + tile.head * plan.k_head
            # One load per thread, distributed through shared memory: one load per column would take as many registers.
            line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            at = n * BN + gl.arange(0, BN, line)
            k_data = gl.load(data + at, mask=at < plan.seq_k, other=0).reshape([1, BN // 8, 4, 2])
            k_data = gl.convert_layout(k_data, layout)
        if plan.RANGE is None:
            columns = eights + mine
            keep = plan.RULE(places, columns, q_data, k_data, plan.PARAMS) & (columns < limit)
        else:
            # One comparison for both ends of a row's range; only the column's number changes from pair to pair.
            first, last = plan.RANGE(places, q_data, plan.PARAMS)
            first = gl.maximum(first, 0)
            length = gl.maximum(gl.minimum(last + 1, limit) - first, 0)
            keep = (eights + (mine - first)).to(gl.uint32, bitcast=True) < length.to(gl.uint32, bitcast=True)
    return gl.convert_layout(gl.where(keep, wide, float("-inf")).reshape([64, BN]), s.type.layout)


@gluon.jit
def capped(s, plan):
    """cap * tanh(s * scale / cap) where the launch has a softcap, as 1 - 2 / (1 + e^2x): exact to float32's rounding."""
    if plan.CAP:
        s = plan.cap - 2.0 * plan.cap / (1.0 + gl.exp2(s * plan.cap_log2))
    return s


@gluon.jit
def row_sums(p):
    """Sums of p's rows [64, 4]: one partial sum for each of the four threads that hold a row, added up at the end."""
    quads = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(quads, 3), 1)


@gluon.jit
def weighed(s, top, scale):
    """2^((s - top) scale) and its row sums."""
    p = gl.exp2(s * scale - (top * scale)[:, None])
    return p, row_sums(p)


@gluon.jit
def begin_rows(s, scale):
    """The first tile of keys: the rows' maxima, the weights against them, their sums."""
    m = gl.maximum(gl.max(s, 1), LOWEST)
    p, sums = weighed(s, m, scale)
    return m, p, sums


@gluon.jit
def declare_flag(PART: gl.constexpr):
    """Declares the predicate that `any_above` sets; once per warpgroup, before its loops."""
    gl.inline_asm_elementwise(
        f".reg .pred hone_above_{PART}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def any_above(sums, PART: gl.constexpr):
    """Whether any of the warpgroup's partial sums is above 2^12 or NaN: a voting barrier of its 128 threads."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gtu.f32 p, $2, 0f45800000; setp.gtu.or.f32 p, $3, 0f45800000, p; "
        + f"bar.red.or.pred hone_above_{PART}, {11 + PART}, 128, p; mov.b32 $0, 0; mov.b32 $1, 0; }}",
        "=f,=f,f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )
    flag = gl.inline_asm_elementwise(
        f"selp.b32 $0, 1, 0, hone_above_{PART};", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return flag != 0


@gluon.jit
def pinned(total):
    """`total` unchanged; code after this point starts only when it has been computed.

    ptxas moves the wait for a product above arithmetic that does not depend on it, and the softmax would no longer overlap
    the product. It moves no wait above a barrier, even one that is never executed (no sum is negative).
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
    # An accumulator's registers alternate in pairs between the two rows that a thread holds a part of.
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
    """`rescaled`, but a warp skips the multiplications if none of its maxima changed."""
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
def finish_rows(acc, m, total, o_desc, o_shared, lse, plan, tile, PART: gl.constexpr):
    """Divides by the sums and stores out of warpgroup PART's 64 rows; without pages also their lse."""
    sums = gl.convert_layout(gl.sum(total, 1), m.type.layout)
    seen = sums > 0.0
    acc = rescaled(acc, gl.where(seen, 1.0 / sums, 0.0))
    if plan.KIND == "paged":
        # A box would reach into the next sequence's tokens.
        rows = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        steps = rows // plan.GROUP
        heads = (tile.m + steps).to(gl.int64) * plan.heads + tile.head * plan.GROUP + rows % plan.GROUP
        at = o_desc + heads[:, None] * acc.shape[1] + columns[None, :]
        gl.store(at, acc.to(o_desc.dtype.element_ty), mask=(tile.at + steps < tile.batch)[:, None])
    else:
        tma.store_wait(0)
        stage = o_shared.index(PART)
        stage.reshape([64, acc.shape[1]]).store(acc.to(o_desc.dtype))
        fence_async_shared()
        tma_store(o_desc, [tile.batch, tile.m * plan.BM + PART * 64, tile.head, 0], stage)
        # After the fence, which would otherwise wait for these stores.
        rows = tile.m * plan.BM + PART * 64 + gl.arange(0, 64, m.type.layout)
        base = (tile.batch * plan.heads + tile.head).to(gl.int64) * plan.seq_q
        value = gl.where(seen, (m * plan.scale_log2 + gl.log2(sums)) * LN2, float("-inf"))
        gl.store(lse + base + rows, value, mask=rows < plan.seq_q)


@gluon.jit
def take_turn(PART: gl.constexpr, PARTS: gl.constexpr):
    """Waits until the previous warpgroup has issued its products."""
    if PARTS > 1:
        named_barrier_sync(8 + PART, 256)


@gluon.jit
def pass_turn(PART: gl.constexpr, PARTS: gl.constexpr):
    """Signals the next warpgroup to issue its products."""
    if PARTS > 1:
        named_barrier_arrive(8 + (PART + 1) % PARTS, 256)
