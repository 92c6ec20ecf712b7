"""The loading warp of the Hopper attention forward, and the shared memory from which the warpgroups read (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hone.ops.attention.gluon_tiles import Tile, keys_at, tile_at
from hone.ops.compat import aggregate, tma_load, warpgroup_barrier

_Memory = gl._core.shared_memory_descriptor


@aggregate
class Buffers:
    """Shared memory of a program: ring buffers of queries, keys, values and tile numbers, with two barriers per slot."""

    q: _Memory
    k: _Memory
    v: _Memory
    out: _Memory
    ticket: _Memory
    q_ready: _Memory
    q_free: _Memory
    k_ready: _Memory
    k_free: _Memory
    v_ready: _Memory
    v_free: _Memory
    ticket_ready: _Memory
    ticket_free: _Memory
    PARTS: gl.constexpr
    STAGES: gl.constexpr
    Q_STAGES: gl.constexpr
    D: gl.constexpr
    DV: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, out, ticket, q_ready, q_free, k_ready, k_free, v_ready, v_free, ticket_ready, ticket_free
    ):
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.ticket = ticket
        self.q_ready = q_ready
        self.q_free = q_free
        self.k_ready = k_ready
        self.k_free = k_free
        self.v_ready = v_ready
        self.v_free = v_free
        self.ticket_ready = ticket_ready
        self.ticket_free = ticket_free
        self.PARTS = gl.constexpr(out.shape[0])
        self.STAGES = gl.constexpr(k.shape[0])
        self.Q_STAGES = gl.constexpr(q.shape[0] // out.shape[0])
        self.D = gl.constexpr(k.shape[4])
        self.DV = gl.constexpr(v.shape[4])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def _load_keys(desc, plan, tile, n, slot, ready, free, shared):
    STAGES: gl.constexpr = shared.shape[0]
    b = slot % STAGES
    mbarrier.wait(free.index(b), ((slot // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(b), desc.block_type.nbytes)
    tma_load(desc, [tile.batch, n * plan.BN, tile.head // plan.GROUP, 0], ready.index(b), shared.index(b))


@gluon.jit
def publish(tile, turn, mem):
    """Passes the number of the program's `turn`-th tile to the warpgroups."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = turn % 2
    mbarrier.wait(mem.ticket_free.index(i), ((turn // 2) & 1) ^ 1)
    mem.ticket.index(i * 8).store(gl.full([1], tile.batch, gl.int32, one))
    mem.ticket.index(i * 8 + 1).store(gl.full([1], tile.head, gl.int32, one))
    mem.ticket.index(i * 8 + 2).store(gl.full([1], tile.m, gl.int32, one))
    mem.ticket.index(i * 8 + 3).store(gl.full([1], tile.count, gl.int32, one))
    mem.ticket.index(i * 8 + 4).store(gl.full([1], tile.partial, gl.int32, one))
    mem.ticket.index(i * 8 + 5).store(gl.full([1], tile.at, gl.int32, one))
    mem.ticket.index(i * 8 + 6).store(gl.full([1], tile.first, gl.int32, one))
    warpgroup_barrier()
    mbarrier.arrive(mem.ticket_ready.index(i))


@gluon.jit
def _noted(mem, at):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(mem.ticket.index(at).load(one), 0)


@gluon.jit
def published(mem, turn):
    """The turn-th tile of this program."""
    i = turn % 2
    mbarrier.wait(mem.ticket_ready.index(i), (turn // 2) & 1)
    tile = Tile(
        _noted(mem, i * 8),
        _noted(mem, i * 8 + 1),
        _noted(mem, i * 8 + 2),
        _noted(mem, i * 8 + 3),
        _noted(mem, i * 8 + 4),
        _noted(mem, i * 8 + 5),
        _noted(mem, i * 8 + 6),
    )
    warpgroup_barrier()
    mbarrier.arrive(mem.ticket_free.index(i))
    return tile


@gluon.jit
def clear_tail(mem, slot, tile, plan):
    """Of a sequence's last values, in `slot`, zeros the rows past its end: whatever is there, their weight of 0 counts."""
    BN: gl.constexpr = plan.BN
    LANES: gl.constexpr = mem.DV // 8
    line: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    limit = tile.batch - tile.first * BN
    if (tile.count > 0) & (limit < BN):
        b = slot % mem.STAGES
        mbarrier.wait(mem.v_ready.index(b), (slot // mem.STAGES) & 1)
        values = mem.v.index(b).reshape([BN, mem.DV])
        for r in gl.static_range(BN // 16):
            if (r + 1) * 16 > limit:
                part = values.slice(r * 16, 16)
                rows = r * 16 + gl.arange(0, 16, gl.SliceLayout(1, line))
                kept = part.load(line)
                part.store(gl.where((rows < limit)[:, None], kept, gl.zeros_like(kept)))
        # Both warpgroups write the same, each before its own product reads it.
        fence_async_shared()
        warpgroup_barrier()


@gluon.jit
def draw(counter):
    """Atomically increments the counter; only the first lane gets the old value, and nothing waits for it here."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }",
        "=&r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def drawn(number):
    """The result of `draw` in all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter, mem, plan):
    """The loading warp: fetches the number of the next tile, then loads its queries, keys and values.

    Tile numbers and list entries are loaded one tile, or one step, before they are used, so that the warpgroups never wait
    for them.
    """
    slot = 0
    turn = 0
    number = gl.program_id(0) - gl.num_programs(0)
    tile = tile_at(plan, gl.program_id(0))
    # Not `last = tile`: Triton 3.6 carries through a loop only names whose value changes in it, and these two would enter
    # the loops as the same values that are assigned to them there.
    last = tile_at(plan, gl.program_id(0))
    last_n = 0
    while tile.count > 0:
        publish(tile, turn, mem)
        for part in gl.static_range(mem.PARTS):
            i = turn % mem.Q_STAGES * mem.PARTS + part
            mbarrier.wait(mem.q_free.index(i), ((turn // mem.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(mem.q_ready.index(i), q_desc.block_type.nbytes)
            place = tile.m * plan.BM + part * 64
            tma_load(q_desc, [tile.batch, place, tile.head, 0], mem.q_ready.index(i), mem.q.index(i))
        turn += 1
        ahead = tile_at(plan, drawn(number) + 2 * gl.num_programs(0))
        number = draw(counter)
        n = tile.first
        for j in range(tile.count):
            _load_keys(k_desc, plan, tile, n, slot, mem.k_ready, mem.k_free, mem.k)
            next_n = keys_at(plan, tile, j + 1, tile.count)
            # Values are loaded one tile after their keys: the order in which the products use them.
            if slot > 0:
                _load_keys(v_desc, plan, last, last_n, slot - 1, mem.v_ready, mem.v_free, mem.v)
            slot += 1
            last = tile
            last_n = n
            n = next_n
        tile = ahead
    publish(tile, turn, mem)
    _load_keys(v_desc, plan, last, last_n, slot - 1, mem.v_ready, mem.v_free, mem.v)
