"""Parts shared by the warpgroups of the attention backward: the problem, shared memory, masks, and the order of tiles.

Legend: b, h a sequence and a query head; m, n a tile of queries and of keys; BM queries and 128 keys a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from hone.ops.compat import aggregate, warpgroup_barrier


@aggregate
class Problem:
    """Inputs of every warpgroup: descriptors, block lists, sizes, and the compile-time choices."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    d_out: tma.tensor_descriptor
    stats: tma.tensor_descriptor
    dq: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    q_count: gl.tensor
    q_index: gl.tensor
    q_partial: gl.tensor
    q_order: gl.tensor
    list_b: gl.tensor
    list_h: gl.tensor
    k_data: gl.tensor
    k_data_b: gl.tensor
    k_data_h: gl.tensor
    counter: gl.tensor
    scale: gl.tensor
    num_tiles: gl.tensor
    num_kv_heads: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    GROUP: gl.constexpr
    MASK: gl.constexpr
    RULE: gl.constexpr
    QUERIES: gl.constexpr
    PARAMS: gl.constexpr
    HAS_DATA: gl.constexpr
    SOFTCAP: gl.constexpr
    DYNAMIC: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, d_out, stats, dq, dk, dv, q_count, q_index, q_partial, q_order, list_b, list_h,
        k_data, k_data_b, k_data_h, counter, scale, num_tiles, num_kv_heads, seq_q, seq_k,
        GROUP, MASK, RULE, QUERIES, PARAMS, HAS_DATA, SOFTCAP, DYNAMIC,
    ):  # fmt: skip
        self.q, self.k, self.v, self.d_out = q, k, v, d_out
        self.stats, self.dq, self.dk, self.dv = stats, dq, dk, dv
        self.q_count, self.q_index, self.q_partial = q_count, q_index, q_partial
        self.q_order, self.list_b, self.list_h = q_order, list_b, list_h
        self.k_data, self.k_data_b, self.k_data_h = k_data, k_data_b, k_data_h
        self.counter, self.scale, self.num_tiles, self.num_kv_heads = counter, scale, num_tiles, num_kv_heads
        self.seq_q, self.seq_k = seq_q, seq_k
        self.GROUP, self.MASK = gl.constexpr(GROUP), gl.constexpr(MASK)
        self.RULE, self.QUERIES = gl.constexpr(RULE), gl.constexpr(QUERIES)
        self.PARAMS, self.HAS_DATA = gl.constexpr(PARAMS), gl.constexpr(HAS_DATA)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.DYNAMIC = gl.constexpr(DYNAMIC)


@aggregate
class Shared:
    """The program's shared memory and its barriers: `_full`: the data has arrived, `_empty`: it may be overwritten."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    d_out: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    q_data: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    d_out_full: gl.shared_memory_descriptor
    d_out_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, d_out, lse, delta, q_data, ds, dq, tile, k_empty, v_empty, q_bars, d_out_bars, ds_bars, tile_bars
    ):
        self.k, self.v, self.q, self.d_out, self.lse, self.delta, self.ds, self.dq = k, v, q, d_out, lse, delta, ds, dq
        self.q_data, self.tile, self.k_empty, self.v_empty = q_data, tile, k_empty, v_empty
        self.tile_full, self.tile_empty = tile_bars
        self.q_full, self.q_empty = q_bars
        self.d_out_full, self.d_out_empty = d_out_bars
        self.ds_full, self.ds_empty = ds_bars


@gluon.jit
def _uniform(x):
    # Marks x, equal in every thread, as uniform for ptxas, which then keeps values derived from it in uniform registers.
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tile(p, t, BN: gl.constexpr):
    """The sequence, key head and tile of keys that come t-th.

    Heads are the outer loop, so that concurrent programs share a few heads' q, d_out and dq in L2. Heads descend, so that
    this pass starts with the data the last one left in L2, and leaves the next pass its own. Tiles ascend: under a causal
    mask the longest comes first. With lists there are two rounds through the heads: the first `num_long` of each head's
    order, then the others, so that no long tile runs last.
    """
    num_n = gl.cdiv(p.seq_k, BN)
    if p.MASK == "lists":
        heads = p.num_tiles // num_n
        num_long = gl.load(p.counter + 1)
        late = t >= num_long * heads
        width = gl.where(late, num_n - num_long, num_long)
        t = gl.where(late, t - num_long * heads, t)
        head = heads - 1 - t // width
        b = head // p.num_kv_heads
        kv_head = head % p.num_kv_heads
        rank = gl.where(late, num_long, 0) + t % width
        n = _uniform(gl.load(p.q_order + b * p.list_b + kv_head * p.GROUP * p.list_h + rank))
    else:
        head = (p.num_tiles - 1 - t) // num_n
        b = head // p.num_kv_heads
        kv_head = head % p.num_kv_heads
        n = t % num_n
    return b, kv_head, n


@gluon.jit
def _is_empty(p, t, BM: gl.constexpr, BN: gl.constexpr):
    # Whether the t-th tile exists and no query attends to its keys.
    b, kv_head, n = tile(p, gl.minimum(t, p.num_tiles - 1), BN)
    total = t * 0
    for g in range(p.GROUP):
        _first, _masked, count = span(p, b, kv_head * p.GROUP + g, n, BM, BN)
        total += count
    return (total == 0) & (t < p.num_tiles)


@gluon.jit
def next_tile(p, s, done):
    """The tile after the program's `done`-th, as fetched by its loading warp; num_tiles when there is none."""
    if p.DYNAMIC:
        lone: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        mbarrier.wait(s.tile_full.index(done & 1), (done >> 1) & 1)
        t = _uniform(gl.sum(s.tile.index(done & 1).load(lone), 0))
        mbarrier.arrive(s.tile_empty.index(done & 1))
    else:
        t = p.num_tiles
    return t


@gluon.jit
def draw_tile(p, s, done, BM: gl.constexpr, BN: gl.constexpr):
    """In the loading warp: fetches the next free tile and publishes its number.

    Warpgroups pass through an empty tile without waiting for a load. An empty tile is therefore published only after all of
    them have finished the tile before; otherwise one could run ahead and another miss a phase of a barrier.
    """
    if p.DYNAMIC:
        lone: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        t = gl.num_programs(0) + gl.atomic_add(p.counter, 1)
        if p.MASK == "lists":
            empty = _is_empty(p, t, BM, BN)
            mbarrier.wait(s.k_empty.index(0), done & 1, pred=empty)
            mbarrier.wait(s.v_empty.index(0), done & 1, pred=empty)
        mbarrier.wait(s.tile_empty.index(done & 1), ((done >> 1) & 1) ^ 1)
        s.tile.index(done & 1).store(gl.full([1], t, gl.int32, lone))
        warpgroup_barrier()
        mbarrier.arrive(s.tile_full.index(done & 1))
    else:
        t = p.num_tiles
    return t


@gluon.jit
def span(p, b, h, n, BM: gl.constexpr, BN: gl.constexpr):
    # The query tiles that attend to key tile n: the first one (or its place in the list), the number that need a mask (they
    # come first), and the number of all.
    num_m = gl.cdiv(p.seq_q, BM)
    first = n * 0
    masked = n * 0
    count = num_m
    if p.MASK == "lists":
        at = b * p.list_b + h * p.list_h + n
        first = at * num_m
        count = gl.load(p.q_count + at)
        masked = gl.load(p.q_partial + at)
    elif p.MASK == "causal":
        offset = p.seq_k - p.seq_q
        first = gl.minimum(gl.maximum(n * BN - offset, 0) // BM, num_m)
        count = num_m - first
        # From this query tile on every row attends to the whole key tile.
        whole = gl.maximum(n * BN + BN - 1 - offset + BM - 1, 0) // BM
        masked = gl.minimum(gl.maximum(whole - first, 0), count)
    if (n + 1) * BN > p.seq_k:
        masked = count
    return first, masked, count


@gluon.jit
def num_skipped(p, first, masked, n, KEY: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Number of leading query tiles that attend to none of key tile n's keys from its KEY-th on, under a causal mask."""
    skipped = masked * 0
    if p.MASK == "causal":
        before = (n * BN + KEY - (p.seq_k - p.seq_q)) // BM
        skipped = gl.minimum(gl.maximum(before - first, 0), masked)
    return skipped


@gluon.jit
def query_tile(p, first, j):
    """The j-th tile of queries of a span."""
    if p.MASK == "lists":
        m = gl.load(p.q_index + first + j)
    else:
        m = first + j
    return m


@gluon.jit
def keep(p, b, h, q_at, k_at, q_data):
    """Mask [64, BM] of pairs of keys k_at and queries q_at. Values of rows past the last query do not matter: their p is 0.

    A rule takes a query's position among the keys. `q_data` holds the mask's int32 per query, if it has any.
    """
    rows = k_at[:, None]
    cols = (q_at + (p.seq_k - p.seq_q))[None, :]
    if p.MASK == "causal":
        kept = rows <= cols
    elif p.QUERIES is not None:
        # One comparison for both ends of a key's range.
        first, last = p.QUERIES(rows, p.PARAMS)
        length = gl.where(rows < p.seq_k, gl.maximum(last + 1 - first, 0), 0)
        kept = (cols - first).to(gl.uint32, bitcast=True) < length.to(gl.uint32, bitcast=True)
    else:
        kept = rows < p.seq_k
    if p.MASK == "lists" and p.QUERIES is None:
        if p.HAS_DATA[1]:
            k_data = gl.load(p.k_data + b * p.k_data_b + h * p.k_data_h + k_at, mask=k_at < p.seq_k, other=0)
        else:
            k_data = k_at * 0
        kept = kept & p.RULE(cols, rows, q_data[None, :], k_data[:, None], p.PARAMS)
    return kept
