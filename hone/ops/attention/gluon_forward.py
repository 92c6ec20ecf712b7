"""Attention forward on Hopper: one warp loads by TMA, warpgroups of 64 rows alternate on the tensor cores (Gluon).

Structure after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). In addition, the first product of a program's next
tile is issued before the last product of the current one, so that the tensor cores are not idle between tiles.
"""

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

from hone.ops.attention.gluon_loads import Buffers, barriers, clear_tail, produce, published
from hone.ops.attention.gluon_ranges import keys_of
from hone.ops.attention.gluon_tiles import (
    Plan,
    any_above,
    begin_rows,
    capped,
    declare_flag,
    finish_rows,
    keys_at,
    masked,
    pass_turn,
    pinned,
    query_data,
    rescaled_if_moved,
    take_turn,
    weighed,
)
from hone.ops.attention.masks import Tiles, outer_strides
from hone.ops.descriptors import boxes
from hone.ops.dispatch import locate

_LOG2E = 1.4426950408889634
_SPANS = {"causal": 16, "full": 1, "lists": 32}
"""Number of heads whose tiles run at the same time."""

PARTS = 2
"""Computing warpgroups, 64 queries each."""

REGISTERS, MAX_REGISTERS = 240, 168
"""Registers per thread of a computing warpgroup, and the resulting average over all threads."""


@gluon.jit
def _queries(mem, turn, live, layout: gl.constexpr, PART: gl.constexpr, Q_REG: gl.constexpr):
    """This warpgroup's queries of the turn-th tile: a view of shared memory, or registers (then the slot is freed at once)."""
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
    """Issues acc + p v for the values in `slot`, once they have arrived."""
    b = slot % mem.STAGES
    mbarrier.wait(mem.v_ready.index(b), (slot // mem.STAGES) & 1)
    return warpgroup_mma(p, mem.v.index(b).reshape([mem.v.shape[2], mem.DV]), acc, is_async=True)


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
    numbers,
    mem,
    plan,
    layout: gl.constexpr,
    PART: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Scores of the keys in `slot` and, overlapping their softmax, the weighted values of the slot before.

    Weights are computed against a row's previous maximum without a search for a new one; only where their sum exceeds 2^12
    are they computed again with new maxima. Weights up to 2^12 are as exact as those up to 1.
    """
    n = keys_at(plan, tile, j, tile.partial)
    b = slot % mem.STAGES
    mbarrier.wait(mem.k_ready.index(b), (slot // mem.STAGES) & 1)
    if TURNS:
        take_turn(PART, mem.PARTS)
    s_token = _scores(q, mem, slot, layout)
    acc_token = _weighted(p, mem, slot - 1, acc)
    if TURNS:
        pass_turn(PART, mem.PARTS)
    s = capped(warpgroup_mma_wait(1, deps=[s_token]), plan)
    if plan.KIND != "full" and j < tile.partial:
        s = masked(s, plan, tile, n, numbers, PART)
    weights, sums = weighed(s, m, plan.scale_log2)
    new_p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    alpha = m * 0.0 + 1.0
    if any_above(sums, PART):
        keys = mem.k.index(b).reshape([plan.BN, mem.D]).permute((1, 0))
        s = capped(warpgroup_mma(q, keys, gl.zeros([64, plan.BN], gl.float32, layout), use_acc=False), plan)
        if plan.KIND != "full" and j < tile.partial:
            s = masked(s, plan, tile, n, numbers, PART)
        top = gl.maximum(gl.max(s, 1), m)
        weights, sums = weighed(s, top, plan.scale_log2)
        new_p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
        alpha = gl.exp2((m - top) * plan.scale_log2)
        m = top
    mbarrier.arrive(mem.k_free.index(b))
    total = total * gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None] + sums
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(mem.v_free.index((slot - 1) % mem.STAGES))
    return rescaled_if_moved(acc, alpha), new_p, m, total


@gluon.jit
def consume(o_desc, lse, mem, plan, PART: gl.constexpr, Q_REG: gl.constexpr, TURNS: gl.constexpr):
    """One computing warpgroup: 64 rows of every tile of this program, of which there may be none."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, plan.BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, mem.DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    declare_flag(PART)
    if TURNS and PART == mem.PARTS - 1:
        pass_turn(PART, mem.PARTS)
    tile = published(mem, 0)
    numbers = query_data(plan, tile, PART, gl.SliceLayout(1, s_layout))
    live = tile.count > 0
    q = _queries(mem, 0, live, s_layout, PART, Q_REG)
    mbarrier.wait(mem.k_ready.index(0), 0, pred=live)
    if TURNS:
        take_turn(PART, mem.PARTS)
    s_token = _scores(q, mem, 0, s_layout)
    if TURNS:
        pass_turn(PART, mem.PARTS)
    s = capped(warpgroup_mma_wait(0, deps=[s_token]), plan)
    mbarrier.arrive(mem.k_free.index(0), pred=live)
    if tile.partial > 0:
        s = masked(s, plan, tile, tile.first, numbers, PART)
    m, weights, total = begin_rows(s, plan.scale_log2)
    p = gl.convert_layout(weights.to(mem.k.dtype), p_layout)
    if plan.KIND == "paged":
        clear_tail(mem, 0, tile, plan)
    slot = 1
    turn = 0
    while tile.count > 0:
        acc = gl.zeros([64, mem.DV], gl.float32, o_layout)
        for j in range(1, tile.count):
            acc, p, m, total = _step(q, acc, p, m, total, slot, j, tile, numbers, mem, plan, s_layout, PART, TURNS)
            slot += 1
        # The last values of this tile, overlapped with the first softmax of the next.
        if not Q_REG:
            mbarrier.arrive(mem.q_free.index(turn % mem.Q_STAGES * mem.PARTS + PART))
        turn += 1
        ahead = published(mem, turn)
        live = ahead.count > 0
        numbers = query_data(plan, ahead, PART, gl.SliceLayout(1, s_layout))
        q = _queries(mem, turn, live, s_layout, PART, Q_REG)
        b = slot % mem.STAGES
        mbarrier.wait(mem.k_ready.index(b), (slot // mem.STAGES) & 1, pred=live)
        if TURNS:
            take_turn(PART, mem.PARTS)
        s_token = _scores(q, mem, slot, s_layout)
        acc_token = _weighted(p, mem, slot - 1, acc)
        if TURNS:
            pass_turn(PART, mem.PARTS)
        s = capped(warpgroup_mma_wait(1, deps=[s_token]), plan)
        mbarrier.arrive(mem.k_free.index(b), pred=live)
        if ahead.partial > 0:
            s = masked(s, plan, ahead, ahead.first, numbers, PART)
        next_m, weights, next_total = begin_rows(s, plan.scale_log2)
        next_total = pinned(next_total)
        acc = warpgroup_mma_wait(0, deps=[acc_token])
        mbarrier.arrive(mem.v_free.index((slot - 1) % mem.STAGES))
        p = gl.convert_layout(weights.to(mem.k.dtype), p_layout)
        finish_rows(acc, m, total, o_desc, mem.out, lse, plan, tile, PART)
        if plan.KIND == "paged":
            clear_tail(mem, slot, ahead, plan)
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
    q_desc, k_desc, v_desc, o_desc, lse, counter, order, kv_index, q_data, k_data,
    seq_q, seq_k, heads, num_m, num_n, num_tiles, span, list_batch, list_head, q_batch, q_head, k_batch, k_head,
    scale_log2, cap, cap_log2,
    KIND: gl.constexpr, RULE: gl.constexpr, RANGE: gl.constexpr, PARAMS: gl.constexpr, DATA: gl.constexpr,
    GROUP: gl.constexpr, CAP: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, Q_REG: gl.constexpr,
    REGS: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor; see the module. Writes out by TMA to o_desc's tensor, and lse float32 [B, H, Sq]."""
    BN: gl.constexpr = k_desc.block_shape[1]
    D: gl.constexpr = k_desc.block_shape[3]
    DV: gl.constexpr = v_desc.block_shape[3]
    Q_SLOTS: gl.constexpr = PARTS if Q_REG else 2 * PARTS
    plan = Plan(
        seq_q, seq_k, heads, num_m, num_n, num_tiles, span, order, kv_index, list_batch, list_head,
        q_data, q_batch, q_head, k_data, k_batch, k_head, scale_log2, cap, cap_log2, KIND, RULE, RANGE, PARAMS, DATA,
        GROUP, 64 * PARTS, BN, CAP,
    )  # fmt: skip
    mem = Buffers(
        gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS, 1, 64, 1, D], q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BN, 1, D], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BN, 1, DV], v_desc.layout),
        gl.allocate_shared_memory(o_desc.dtype, [PARTS, 1, 64, 1, DV], o_desc.layout),
        gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(Q_SLOTS, 1),
        barriers(Q_SLOTS, 1),
        barriers(STAGES, 1),
        barriers(STAGES, PARTS),
        barriers(STAGES, 1),
        barriers(STAGES, PARTS),
        barriers(2, 1),
        barriers(2, PARTS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o_desc, lse, mem, plan, 0, Q_REG, TURNS)),
            (consume, (o_desc, lse, mem, plan, 1, Q_REG, TURNS)),
            (produce, (q_desc, k_desc, v_desc, counter, mem, plan)),
        ],
        [4, 1],
        [REGS, 24],
    )


@dataclass(frozen=True)
class Config:
    """Tiling of a launch: keys per tile and tiles of keys in flight; where queries are kept; whether warpgroups alternate."""

    block_n: int
    stages: int
    q_in_registers: bool
    turns: bool = True

    @property
    def block_m(self) -> int:
        return 64 * PARTS


def tile_config(head_dim: int) -> Config:
    """The tiling for heads of this width."""
    if head_dim == 64:  # exponentials take longer than products here: alternating would only delay warpgroups
        return Config(128, 4, True, turns=False)
    if head_dim == 128:
        return Config(128, 2, True)
    return Config(64, 2, False)


def tile_shape(head_dim: int, v_dim: int, limit: int = 0) -> tuple[int, int]:
    """(block_m, block_n) of the lists that `forward` takes: one size, which a mask's block (`limit`) must be a multiple of."""
    config = tile_config(head_dim)
    return config.block_m, config.block_n


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """q [B, Sq, H, Dh], k [B, Sk, KV, Dh], v [B, Sk, KV, Dv] -> out [B, Sq, H, Dv], lse float32 [B, H, Sq] (natural log).

    bfloat16 or float16; the last axis contiguous, other strides multiples of 16 bytes. scale > 0.
    """
    return launch(q, k, v, tiles, scale, softcap, tile_config(q.shape[3]))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    scale: float,
    softcap: float | None,
    config: Config,
    span: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward` with the tiling `config`, `span` heads at a time."""
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads, v_dim = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(batch, seq_q, heads, v_dim)
    lse = q.new_empty((batch, heads, seq_q), dtype=torch.float32)
    num_m, num_n = -(-seq_q // config.block_m), -(-seq_k // config.block_n)
    num_tiles = num_m * heads * batch
    kind = "causal" if tiles.causal else "full" if tiles.full else "lists"
    listed = kind == "lists"
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    log2_scale = scale * _LOG2E
    flash_forward[(min(num_tiles, locate(q.device).num_sms),)](
        boxes(q, 1, 64, 1, head_dim), boxes(k, 1, config.block_n, 1, head_dim),
        boxes(v, 1, config.block_n, 1, v_dim), boxes(out, 1, 64, 1, v_dim), lse, counter,
        tiles.kv_turns if listed else lse, tiles.kv_index if listed else lse,
        lse if tiles.q_data is None else tiles.q_data, lse if tiles.k_data is None else tiles.k_data,
        seq_q, seq_k, heads, num_m, num_n, num_tiles, min(span or _SPANS[kind], batch * heads),
        *outer_strides(tiles.kv_count), *outer_strides(tiles.q_data), *outer_strides(tiles.k_data),
        log2_scale if softcap is None else _LOG2E, softcap or 1.0, 2.0 * log2_scale / (softcap or 1.0),
        KIND=kind, RULE=tiles.gluon_rule() if listed else None, RANGE=keys_of(tiles) if listed else None,
        PARAMS=tiles.params if listed else (),
        DATA=(tiles.q_data is not None, tiles.k_data is not None), GROUP=heads // kv_heads, CAP=softcap is not None,
        PARTS=PARTS, STAGES=config.stages, Q_REG=config.q_in_registers, REGS=REGISTERS, TURNS=config.turns,
        num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out, lse
