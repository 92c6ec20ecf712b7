"""Attention forward on Hopper: one warp loads by TMA, warpgroups of 64 rows take turns at the tensor cores (Gluon).

Structure after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), with one thing more: a program goes through its tiles
without a gap, since the first product of the next tile is issued before the last product of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from hone.ops.compat import tma_load
from hone.ops.dispatch import locate
from hone.ops.gluon.flash_tiles import (
    Plan,
    begin_rows,
    capped,
    extend_rows,
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


@gluon.jit
def _load_keys(desc, plan, tile, n, slot, ready, free, shared):
    STAGES: gl.constexpr = shared.type.shape[0]
    b = slot % STAGES
    mbarrier.wait(free.index(b), ((slot // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(b), desc.block_type.nbytes)
    tma_load(desc, [tile.batch, n * plan.BN, tile.head // plan.GROUP, 0], ready.index(b), shared.index(b))


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
    q_shared,
    k_shared,
    v_shared,
    o_shared,
    q_ready,
    q_free,
    k_ready,
    k_free,
    v_ready,
    v_free,
    plan,
    Q_REG: gl.constexpr,
    OPT: gl.constexpr,
):
    PARTS: gl.constexpr = o_shared.type.shape[0]
    Q_STAGES: gl.constexpr = q_shared.type.shape[0] // PARTS
    slot = 0
    turn = 0
    last = tile_at(plan, gl.program_id(0))
    last_n = 0
    for t in range(gl.program_id(0), plan.num_tiles, gl.num_programs(0)):
        tile = tile_at(plan, t)
        for part in gl.static_range(PARTS):
            i = turn % Q_STAGES * PARTS + part
            mbarrier.wait(q_free.index(i), ((turn // Q_STAGES) & 1) ^ 1)
            mbarrier.expect(q_ready.index(i), q_desc.block_type.nbytes)
            tma_load(
                q_desc, [tile.batch, tile.m * plan.BM + part * 64, tile.head, 0], q_ready.index(i), q_shared.index(i)
            )
        turn += 1
        for j in range(tile.count):
            n = keys_at(plan, tile, j)
            _load_keys(k_desc, plan, tile, n, slot, k_ready, k_free, k_shared)
            # Values follow one tile behind: that is the order in which they are multiplied.
            if slot > 0:
                _load_keys(v_desc, plan, last, last_n, slot - 1, v_ready, v_free, v_shared)
            slot += 1
            last = tile
            last_n = n
    _load_keys(v_desc, plan, last, last_n, slot - 1, v_ready, v_free, v_shared)


@gluon.jit
def _queries(
    q_shared,
    q_ready,
    q_free,
    turn,
    live,
    layout: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    Q_REG: gl.constexpr,
):
    """This warpgroup's queries of the turn-th tile: a view of shared memory, or registers (its slot is then free at once)."""
    Q_STAGES: gl.constexpr = q_shared.type.shape[0] // PARTS
    i = turn % Q_STAGES * PARTS + PART
    mbarrier.wait(q_ready.index(i), (turn // Q_STAGES) & 1, pred=live)
    q = q_shared.index(i).reshape([q_shared.type.shape[2], q_shared.type.shape[4]])
    if Q_REG:
        q = q.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
        mbarrier.arrive(q_free.index(i), pred=live)
    return q


@gluon.jit
def _scores(q, k_shared, k_ready, slot, live, layout: gl.constexpr):
    """Issues q k^T for the keys in `slot` and returns the token."""
    STAGES: gl.constexpr = k_shared.type.shape[0]
    BN: gl.constexpr = k_shared.type.shape[2]
    keys = k_shared.index(slot % STAGES).reshape([BN, k_shared.type.shape[4]]).permute((1, 0))
    return warpgroup_mma(q, keys, gl.zeros([64, BN], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _step(
    q,
    acc,
    p,
    m,
    total,
    slot,
    j,
    tile,
    plan,
    k_shared,
    v_shared,
    k_ready,
    k_free,
    v_ready,
    v_free,
    MASKED: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    s_layout: gl.constexpr,
    p_layout: gl.constexpr,
    OPT: gl.constexpr,
):
    """Scores of the keys in `slot` and, under their softmax, the weighted values of the slot before."""
    STAGES: gl.constexpr = k_shared.type.shape[0]
    b = slot % STAGES
    before = (slot - 1) % STAGES
    mbarrier.wait(k_ready.index(b), (slot // STAGES) & 1)
    if OPT[0]:
        take_turn(PART, PARTS)
    s_token = _scores(q, k_shared, k_ready, slot, True, s_layout)
    mbarrier.wait(v_ready.index(before), ((slot - 1) // STAGES) & 1)
    values = v_shared.index(before).reshape([v_shared.type.shape[2], v_shared.type.shape[4]])
    acc_token = warpgroup_mma(p, values, acc, is_async=True)
    if OPT[0]:
        pass_turn(PART, PARTS)
    s = capped(warpgroup_mma_wait(1, deps=[s_token]), plan)
    mbarrier.arrive(k_free.index(b))
    if MASKED:
        s = masked(s, plan, tile, keys_at(plan, tile, j), PART)
    m, weights, total, alpha = extend_rows(s, m, total, plan.scale_log2, OPT[1], OPT[2], OPT[3])
    total = pinned(total)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(v_free.index(before))
    p = gl.convert_layout(weights.to(k_shared.dtype), p_layout)
    if OPT[3]:
        acc = rescaled_if_moved(acc, alpha)
    else:
        acc = rescaled(acc, alpha)
    return acc, p, m, total


@gluon.jit
def _consume(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
    q_shared,
    k_shared,
    v_shared,
    o_shared,
    q_ready,
    q_free,
    k_ready,
    k_free,
    v_ready,
    v_free,
    plan,
    PART: gl.constexpr,
    Q_REG: gl.constexpr,
    OPT: gl.constexpr,
):
    PARTS: gl.constexpr = o_shared.type.shape[0]
    STAGES: gl.constexpr = k_shared.type.shape[0]
    BN: gl.constexpr = plan.BN
    DV: gl.constexpr = v_shared.type.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    if OPT[0] and PART == PARTS - 1:
        pass_turn(PART, PARTS)
    tile = tile_at(plan, gl.program_id(0))
    q = _queries(q_shared, q_ready, q_free, 0, True, s_layout, PART, PARTS, Q_REG)
    mbarrier.wait(k_ready.index(0), 0)
    if OPT[0]:
        take_turn(PART, PARTS)
    s_token = _scores(q, k_shared, k_ready, 0, True, s_layout)
    if OPT[0]:
        pass_turn(PART, PARTS)
    s = capped(warpgroup_mma_wait(0, deps=[s_token]), plan)
    mbarrier.arrive(k_free.index(0))
    if tile.partial > 0:
        s = masked(s, plan, tile, keys_at(plan, tile, 0), PART)
    m, weights, total = begin_rows(s, plan.scale_log2, OPT[1], OPT[2])
    p = gl.convert_layout(weights.to(k_shared.dtype), p_layout)
    slot = 1
    turn = 0
    for t in range(gl.program_id(0), plan.num_tiles, gl.num_programs(0)):
        acc = gl.zeros([64, DV], gl.float32, o_layout)
        for j in range(1, tile.partial):
            acc, p, m, total = _step(
                q,
                acc,
                p,
                m,
                total,
                slot,
                j,
                tile,
                plan,
                k_shared,
                v_shared,
                k_ready,
                k_free,
                v_ready,
                v_free,
                True,
                PART,
                PARTS,
                s_layout,
                p_layout,
                OPT,
            )
            slot += 1
        for j in range(gl.maximum(tile.partial, 1), tile.count):
            acc, p, m, total = _step(
                q,
                acc,
                p,
                m,
                total,
                slot,
                j,
                tile,
                plan,
                k_shared,
                v_shared,
                k_ready,
                k_free,
                v_ready,
                v_free,
                False,
                PART,
                PARTS,
                s_layout,
                p_layout,
                OPT,
            )
            slot += 1
        # The last values of this tile, and under them the first softmax of the next.
        if not Q_REG:
            mbarrier.arrive(q_free.index(turn % (q_shared.type.shape[0] // PARTS) * PARTS + PART))
        turn += 1
        live = t + gl.num_programs(0) < plan.num_tiles
        ahead = tile_at(plan, gl.minimum(t + gl.num_programs(0), plan.num_tiles - 1))
        q = _queries(q_shared, q_ready, q_free, turn, live, s_layout, PART, PARTS, Q_REG)
        b = slot % STAGES
        before = (slot - 1) % STAGES
        mbarrier.wait(k_ready.index(b), (slot // STAGES) & 1, pred=live)
        if OPT[0]:
            take_turn(PART, PARTS)
        s_token = _scores(q, k_shared, k_ready, slot, live, s_layout)
        mbarrier.wait(v_ready.index(before), ((slot - 1) // STAGES) & 1)
        values = v_shared.index(before).reshape([v_shared.type.shape[2], v_shared.type.shape[4]])
        acc_token = warpgroup_mma(p, values, acc, is_async=True)
        if OPT[0]:
            pass_turn(PART, PARTS)
        s = capped(warpgroup_mma_wait(1, deps=[s_token]), plan)
        mbarrier.arrive(k_free.index(b), pred=live)
        if ahead.partial > 0:
            s = masked(s, plan, ahead, keys_at(plan, ahead, 0), PART)
        next_m, weights, next_total = begin_rows(s, plan.scale_log2, OPT[1], OPT[2])
        next_total = pinned(next_total)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(v_free.index(before))
        p = gl.convert_layout(weights.to(k_shared.dtype), p_layout)
        finish_rows(acc, m, total, o_desc, o_shared, lse, plan, tile, PART, OPT[2])
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
    q_desc, k_desc, v_desc, o_desc, lse, kv_count, kv_index, kv_partial, q_data, k_data,
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
        seq_q,
        seq_k,
        heads,
        num_m,
        num_n,
        num_tiles,
        span,
        kv_count,
        kv_index,
        kv_partial,
        list_batch,
        list_head,
        q_data,
        q_batch,
        q_head,
        k_data,
        k_batch,
        k_head,
        scale_log2,
        cap,
        cap_log2,
        KIND,
        RULE,
        PARAMS,
        DATA,
        GROUP,
        64 * PARTS,
        BN,
        CAP,
    )
    q_shared = gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS, 1, 64, 1, D], q_desc.layout)
    k_shared = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BN, 1, D], k_desc.layout)
    v_shared = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BN, 1, DV], v_desc.layout)
    o_shared = gl.allocate_shared_memory(o_desc.dtype, [PARTS, 1, 64, 1, DV], o_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=PARTS)
        mbarrier.init(v_free.index(i), count=PARTS)
    fence_async_shared()
    if PARTS == 1:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        0,
                        Q_REG,
                        OPT,
                    ),
                ),
                (
                    _produce,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        Q_REG,
                        OPT,
                    ),
                ),
            ],
            [1],
            [24],
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        0,
                        Q_REG,
                        OPT,
                    ),
                ),
                (
                    _consume,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        1,
                        Q_REG,
                        OPT,
                    ),
                ),
                (
                    _produce,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        Q_REG,
                        OPT,
                    ),
                ),
            ],
            [4, 1],
            [REGS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        0,
                        Q_REG,
                        OPT,
                    ),
                ),
                (
                    _consume,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        1,
                        Q_REG,
                        OPT,
                    ),
                ),
                (
                    _consume,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        2,
                        Q_REG,
                        OPT,
                    ),
                ),
                (
                    _produce,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        o_desc,
                        lse,
                        q_shared,
                        k_shared,
                        v_shared,
                        o_shared,
                        q_ready,
                        q_free,
                        k_ready,
                        k_free,
                        v_ready,
                        v_free,
                        plan,
                        Q_REG,
                        OPT,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGS, REGS, 24],
        )


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


def launch(q, k, v, tiles, scale, softcap, config, span=None, opt=(True, 0, True, False)):
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
    list_strides = outer_strides(tiles.kv_count)
    log2_scale = scale * _LOG2E
    flash_forward[(min(num_tiles, locate(q.device).num_sms),)](
        _boxes(q, 64), _boxes(k, config.block_n), _boxes(v, config.block_n), _boxes(out, 64), lse,
        tiles.kv_count if listed else lse, tiles.kv_index if listed else lse, tiles.kv_partial if listed else lse,
        lse if tiles.q_data is None else tiles.q_data, lse if tiles.k_data is None else tiles.k_data,
        seq_q, seq_k, heads, num_m, num_n, num_tiles, span, *list_strides,
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
