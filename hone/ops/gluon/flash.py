"""Attention forward on Hopper: one warp loads by TMA, warpgroups of 64 rows take turns at the tensor cores (Gluon).

Structure after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), with one thing more: a program goes through its tiles
without a gap, since the first product of the next tile is issued before the last product of this one.
"""

from dataclasses import dataclass
from math import log2, pi  # noqa: F401

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hone.ops.compat import aggregate, tma_load
from hone.ops.dispatch import locate
from hone.ops.gluon.flash_tiles import (
    Plan,
    begin_rows,
    capped,
    any_above,
    declare_flag,
    exponentials,
    row_sums,
    extend_rows,
    extend_rows_lazily,
    finish_rows,
    keys_at,
    masked,
    pass_turn,
    pinned,
    rescaled,
    rescaled_if_moved,
    take_turn,
    tile_at,
)
from hone.ops.masks import Tiles, outer_strides

_LOG2E = 1.4426950408889634
_L2_SHARE = 24 << 20
"""Bytes of keys and values that the heads worked on at once may have together, to stay in L2 (60 MB on an H200)."""

_Memory = gl._core.shared_memory_descriptor


@aggregate
class Buffers:
    """Shared memory of a program: rings of queries, keys, values and tile numbers, each slot with its two barriers."""

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
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
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
def _produce(q_desc, k_desc, v_desc, counter, mem, plan, OPT: gl.constexpr):
    """The loading warp: which tile is next, its queries, then its keys and values."""
    slot = 0
    turn = 0
    t = gl.program_id(0)
    last = tile_at(plan, t, not OPT[4])
    last_n = 0
    while t < plan.num_tiles:
        tile = tile_at(plan, t, not OPT[4])
        for part in gl.static_range(mem.PARTS):
            i = turn % mem.Q_STAGES * mem.PARTS + part
            mbarrier.wait(mem.q_free.index(i), ((turn // mem.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(mem.q_ready.index(i), q_desc.block_type.nbytes)
            place = tile.m * plan.BM + part * 64
            tma_load(q_desc, [tile.batch, place, tile.head, 0], mem.q_ready.index(i), mem.q.index(i))
        if OPT[4]:
            t = gl.num_programs(0) + gl.atomic_add(counter, 1)
            mbarrier.wait(mem.ticket_free.index(turn % 2), ((turn // 2) & 1) ^ 1)
            one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            mem.ticket.index(turn % 2).store(gl.full([1], t, gl.int32, one))
            mbarrier.arrive(mem.ticket_ready.index(turn % 2))
        else:
            t += gl.num_programs(0)
        turn += 1
        for j in range(tile.count):
            n = keys_at(plan, tile, j)
            _load_keys(k_desc, plan, tile, n, slot, mem.k_ready, mem.k_free, mem.k)
            # Values follow one tile behind: that is the order in which they are multiplied.
            if slot > 0:
                _load_keys(v_desc, plan, last, last_n, slot - 1, mem.v_ready, mem.v_free, mem.v)
            slot += 1
            last = tile
            last_n = n
    _load_keys(v_desc, plan, last, last_n, slot - 1, mem.v_ready, mem.v_free, mem.v)


@gluon.jit
def _next_tile(t, turn, mem, OPT: gl.constexpr):
    """The number of the tile after this one."""
    if OPT[4]:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        i = (turn - 1) % 2
        mbarrier.wait(mem.ticket_ready.index(i), ((turn - 1) // 2) & 1)
        t = gl.max(mem.ticket.index(i).load(one), 0)
        mbarrier.arrive(mem.ticket_free.index(i))
    else:
        t += gl.num_programs(0)
    return t


@gluon.jit
def _queries(mem, turn, live, layout: gl.constexpr, PART: gl.constexpr, Q_REG: gl.constexpr):
    """This warpgroup's queries of the turn-th tile: a view of shared memory, or registers (its slot is then free at once)."""
    i = turn % mem.Q_STAGES * mem.PARTS + PART
    mbarrier.wait(mem.q_ready.index(i), (turn // mem.Q_STAGES) & 1, pred=live)
    q = mem.q.index(i).reshape([64, mem.D])
    if Q_REG:
        q = q.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
        mbarrier.arrive(mem.q_free.index(i), pred=live)
    return q


@gluon.jit
def _scores(q, mem, slot, layout: gl.constexpr):
    """Issues q k^T for the keys in `slot`."""
    BN: gl.constexpr = mem.k.shape[2]
    keys = mem.k.index(slot % mem.STAGES).reshape([BN, mem.D]).permute((1, 0))
    return warpgroup_mma(q, keys, gl.zeros([64, BN], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _weighted(p, mem, slot, acc):
    """Issues acc + p v for the values in `slot`, once they are there."""
    b = slot % mem.STAGES
    mbarrier.wait(mem.v_ready.index(b), (slot // mem.STAGES) & 1)
    return warpgroup_mma(p, mem.v.index(b).reshape([mem.v.shape[2], mem.DV]), acc, is_async=True)


@gluon.jit
def _step(q, acc, p, m, total, slot, j, tile, mem, plan, s_layout: gl.constexpr, PART: gl.constexpr, OPT: gl.constexpr):
    """Scores of the keys in `slot` and, under their softmax, the weighted values of the slot before."""
    b = slot % mem.STAGES
    mbarrier.wait(mem.k_ready.index(b), (slot // mem.STAGES) & 1)
    if OPT[0]:
        take_turn(PART, mem.PARTS)
    s_token = _scores(q, mem, slot, s_layout)
    acc_token = _weighted(p, mem, slot - 1, acc)
    if OPT[0]:
        pass_turn(PART, mem.PARTS)
    s = capped(warpgroup_mma_wait(1, deps=[s_token]), plan)
    if OPT[3] != 3:
        mbarrier.arrive(mem.k_free.index(b))
    if plan.KIND != "full" and j < tile.partial:
        s = masked(s, plan, tile, keys_at(plan, tile, j), PART)
    if OPT[3] == 3:
        weights = exponentials(s * plan.scale_log2, (m * plan.scale_log2)[:, None], OPT[1])
        sums = row_sums(weights, OPT[2])
        new_p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
        alpha = m * 0.0 + 1.0
        if any_above(sums, PART):
            keys = mem.k.index(b).reshape([plan.BN, mem.D]).permute((1, 0))
            s = capped(warpgroup_mma(q, keys, gl.zeros([64, plan.BN], gl.float32, s_layout), use_acc=False), plan)
            if plan.KIND != "full" and j < tile.partial:
                s = masked(s, plan, tile, keys_at(plan, tile, j), PART)
            top = gl.maximum(gl.max(s, 1), m)
            weights = gl.exp2(s * plan.scale_log2 - (top * plan.scale_log2)[:, None])
            sums = row_sums(weights, OPT[2])
            new_p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
            alpha = gl.exp2((m - top) * plan.scale_log2)
            m = top
        mbarrier.arrive(mem.k_free.index(b))
        total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None] + sums
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(mem.v_free.index((slot - 1) % mem.STAGES))
        p = new_p
    elif OPT[3] == 2:
        m, new_p, total, alpha = extend_rows_lazily(s, m, total, plan.scale_log2, p, OPT[1], OPT[2], PART)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(mem.v_free.index((slot - 1) % mem.STAGES))
        p = new_p
    else:
        m, weights, total, alpha = extend_rows(s, m, total, plan.scale_log2, OPT[1], OPT[2], OPT[3])
        total = pinned(total)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(mem.v_free.index((slot - 1) % mem.STAGES))
        p = gl.convert_layout(weights.to(mem.k.dtype), p.type.layout)
    if OPT[3]:
        acc = rescaled_if_moved(acc, alpha)
    else:
        acc = rescaled(acc, alpha)
    return acc, p, m, total


@gluon.jit
def _consume(o_desc, lse, mem, plan, PART: gl.constexpr, Q_REG: gl.constexpr, OPT: gl.constexpr):
    """A warpgroup: 64 rows of every tile of this program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, mem.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    if OPT[3] >= 2:
        declare_flag(PART)
    if OPT[0] and PART == mem.PARTS - 1:
        pass_turn(PART, mem.PARTS)
    t = gl.program_id(0)
    tile = tile_at(plan, t, not OPT[4])
    q = _queries(mem, 0, True, s_layout, PART, Q_REG)
    mbarrier.wait(mem.k_ready.index(0), 0)
    if OPT[0]:
        take_turn(PART, mem.PARTS)
    s_token = _scores(q, mem, 0, s_layout)
    if OPT[0]:
        pass_turn(PART, mem.PARTS)
    s = capped(warpgroup_mma_wait(0, deps=[s_token]), plan)
    mbarrier.arrive(mem.k_free.index(0))
    if tile.partial > 0:
        s = masked(s, plan, tile, keys_at(plan, tile, 0), PART)
    m, weights, total = begin_rows(s, plan.scale_log2, OPT[1], OPT[2])
    p = gl.convert_layout(weights.to(mem.k.dtype), p_layout)
    slot = 1
    turn = 0
    while t < plan.num_tiles:
        acc = gl.zeros([64, mem.DV], gl.float32, o_layout)
        for j in range(1, tile.count):
            acc, p, m, total = _step(q, acc, p, m, total, slot, j, tile, mem, plan, s_layout, PART, OPT)
            slot += 1
        # The last values of this tile, and under them the first softmax of the next.
        if not Q_REG:
            mbarrier.arrive(mem.q_free.index(turn % mem.Q_STAGES * mem.PARTS + PART))
        turn += 1
        t = _next_tile(t, turn, mem, OPT)
        live = t < plan.num_tiles
        ahead = tile_at(plan, gl.minimum(t, plan.num_tiles - 1), not OPT[4])
        q = _queries(mem, turn, live, s_layout, PART, Q_REG)
        b = slot % mem.STAGES
        mbarrier.wait(mem.k_ready.index(b), (slot // mem.STAGES) & 1, pred=live)
        if OPT[0]:
            take_turn(PART, mem.PARTS)
        s_token = _scores(q, mem, slot, s_layout)
        acc_token = _weighted(p, mem, slot - 1, acc)
        if OPT[0]:
            pass_turn(PART, mem.PARTS)
        s = capped(warpgroup_mma_wait(1, deps=[s_token]), plan)
        mbarrier.arrive(mem.k_free.index(b), pred=live)
        if ahead.partial > 0:
            s = masked(s, plan, ahead, keys_at(plan, ahead, 0), PART)
        next_m, weights, next_total = begin_rows(s, plan.scale_log2, OPT[1], OPT[2])
        next_total = pinned(next_total)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(mem.v_free.index((slot - 1) % mem.STAGES))
        p = gl.convert_layout(weights.to(mem.k.dtype), p_layout)
        finish_rows(acc, m, total, o_desc, mem.out, lse, plan, tile, PART, OPT[2])
        m = next_m
        total = next_total
        tile = ahead
        slot += 1
    tma.store_wait(0)


_SIZES = (
    "seq_q", "seq_k", "heads", "num_m", "num_n", "num_tiles", "span", "list_batch", "list_head",
    "q_batch", "q_head", "k_batch", "k_head",
)  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def flash_forward(
    q_desc, k_desc, v_desc, o_desc, lse, counter, kv_count, kv_index, kv_partial, q_data, k_data,
    seq_q, seq_k, heads, num_m, num_n, num_tiles, span, list_batch, list_head, q_batch, q_head, k_batch, k_head,
    scale_log2, cap, cap_log2,
    KIND: gl.constexpr, RULE: gl.constexpr, PARAMS: gl.constexpr, DATA: gl.constexpr, GROUP: gl.constexpr,
    CAP: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, Q_REG: gl.constexpr, REGS: gl.constexpr, OPT: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; see the module. out by TMA in o_desc's tensor, lse float32 [B, H, Sq]."""
    BN: gl.constexpr = k_desc.block_shape[1]
    D: gl.constexpr = k_desc.block_shape[3]
    DV: gl.constexpr = v_desc.block_shape[3]
    Q_SLOTS: gl.constexpr = PARTS if Q_REG else 2 * PARTS
    plan = Plan(
        seq_q, seq_k, heads, num_m, num_n, num_tiles, span, kv_count, kv_index, kv_partial, list_batch, list_head,
        q_data, q_batch, q_head, k_data, k_batch, k_head, scale_log2, cap, cap_log2, KIND, RULE, PARAMS, DATA, GROUP,
        64 * PARTS, BN, CAP,
    )  # fmt: skip
    mem = Buffers(
        gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS, 1, 64, 1, D], q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BN, 1, D], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BN, 1, DV], v_desc.layout),
        gl.allocate_shared_memory(o_desc.dtype, [PARTS, 1, 64, 1, DV], o_desc.layout),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(Q_SLOTS, 1),
        _barriers(Q_SLOTS, 1),
        _barriers(STAGES, 1),
        _barriers(STAGES, PARTS),
        _barriers(STAGES, 1),
        _barriers(STAGES, PARTS),
        _barriers(2, 1),
        _barriers(2, PARTS),
    )
    fence_async_shared()
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_consume, (o_desc, lse, mem, plan, 0, Q_REG, OPT)),
                (_consume, (o_desc, lse, mem, plan, 1, Q_REG, OPT)),
                (_produce, (q_desc, k_desc, v_desc, counter, mem, plan, OPT)),
            ],
            [4, 1],
            [REGS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (o_desc, lse, mem, plan, 0, Q_REG, OPT)),
                (_consume, (o_desc, lse, mem, plan, 1, Q_REG, OPT)),
                (_consume, (o_desc, lse, mem, plan, 2, Q_REG, OPT)),
                (_produce, (q_desc, k_desc, v_desc, counter, mem, plan, OPT)),
            ],
            [4, 4, 1],
            [REGS, REGS, 24],
        )


@dataclass(frozen=True)
class Config:
    """How a launch is cut: warpgroups of 64 rows, keys a tile, tiles of keys in flight, and a consumer's registers."""

    parts: int
    block_n: int
    stages: int
    registers: int
    max_registers: int
    q_in_registers: bool

    @property
    def block_m(self) -> int:
        return 64 * self.parts


def tile_config(head_dim: int, v_dim: int, limit: int = 0) -> Config:
    """How attention with heads of these widths is cut; `limit` bounds both sides of a tile (a mask's table), 0 for none."""
    if head_dim == 64:
        return Config(2, 128, 4, 240, 168, True)
    if head_dim == 128:
        return Config(2, 128, 2, 240, 168, True)
    return Config(2, 64, 2, 240, 168, False)


def tile_shape(head_dim: int, v_dim: int, limit: int = 0) -> tuple[int, int]:
    """(block_m, block_n) of the lists that `forward` takes."""
    config = tile_config(head_dim, v_dim, limit)
    return config.block_m, config.block_n


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q [B, Sq, H, Dh], k [B, Sk, KV, Dh], v [B, Sk, KV, Dv] -> out [B, Sq, H, Dv], lse float32 [B, H, Sq] (natural log).

    bfloat16 or float16; the last axis contiguous, other strides multiples of 16 bytes. scale > 0.
    """
    return launch(q, k, v, tiles, scale, softcap, tile_config(q.shape[3], v.shape[3]))


def launch(q, k, v, tiles, scale, softcap, config, span=None, opt=(True, 0, True, 3, True)):
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads, v_dim = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(batch, seq_q, heads, v_dim)
    lse = q.new_empty((batch, heads, seq_q), dtype=torch.float32)
    num_m, num_n = -(-seq_q // config.block_m), -(-seq_k // config.block_n)
    num_tiles = num_m * heads * batch
    if span is None:
        span = max(1, min(batch * heads, _L2_SHARE * heads // (seq_k * (head_dim + v_dim) * 2 * kv_heads)))
    kind = "causal" if tiles.causal else "full" if tiles.full else "lists"
    listed = kind == "lists"
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if opt[4] else lse
    log2_scale = scale * _LOG2E
    flash_forward[(min(num_tiles, locate(q.device).num_sms),)](
        _boxes(q, 64), _boxes(k, config.block_n), _boxes(v, config.block_n), _boxes(out, 64), lse, counter,
        tiles.kv_count if listed else lse, tiles.kv_index if listed else lse, tiles.kv_partial if listed else lse,
        lse if tiles.q_data is None else tiles.q_data, lse if tiles.k_data is None else tiles.k_data,
        seq_q, seq_k, heads, num_m, num_n, num_tiles, span, *outer_strides(tiles.kv_count),
        *outer_strides(tiles.q_data), *outer_strides(tiles.k_data),
        log2_scale if softcap is None else _LOG2E, softcap or 1.0, 2.0 * log2_scale / (softcap or 1.0),
        KIND=kind, RULE=tiles.gluon_rule() if listed else None, PARAMS=tiles.params if listed else (),
        DATA=(tiles.q_data is not None, tiles.k_data is not None), GROUP=heads // kv_heads, CAP=softcap is not None,
        PARTS=config.parts, STAGES=config.stages, Q_REG=config.q_in_registers, REGS=config.registers, OPT=opt,
        num_warps=4, maxnreg=config.max_registers,
    )  # fmt: skip
    return out, lse


def _boxes(made: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor that moves `rows` rows of one head at a time; rows past the end of a sequence read as zeros."""
    width = made.shape[3]
    grain = 16 // made.element_size()
    strides = [s if n > 1 else -(-width // grain) * grain for s, n in zip(made.stride()[:3], made.shape[:3])]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(made, list(made.shape), [*strides, 1], [1, rows, 1, width], layout)
