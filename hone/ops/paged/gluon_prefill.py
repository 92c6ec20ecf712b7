"""Prefill attention over pages on Hopper: the forward of `hone.ops.attention.gluon_forward`, which reads pages in place (Gluon).

The query heads of one key/value head are packed into a tile, so that keys are read once for all of them. A small kernel
first lists the tiles of all sequences on the device, the last (longest) of a sequence first; programs draw from that list.
Boxes of the tensor memory accelerator are parts of a page, each of one panel of 128 bytes of the swizzled tile that the
products read.

Legend: R sequences, KV key/value heads, G query heads of one of them, S slots of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hone.ops.attention.gluon_forward import MAX_REGISTERS, PARTS, REGISTERS, consume, tile_config
from hone.ops.attention.gluon_loads import Buffers, barriers, draw, drawn, publish
from hone.ops.attention.gluon_tiles import Plan, Tile
from hone.ops.compat import tma_load
from hone.ops.descriptors import boxes
from hone.ops.paged.triton_prefill import tile_of

_LOG2E = 1.4426950408889634
_NUMBERS = 8
"""Numbers of a record in the list of tiles: sequence, first token, its position, the sequence's length; the rest is unused."""


@triton.jit(do_not_specialize=["num_seqs", "min_tokens"])
def list_tiles(
    query_lens, seq_lens, records, counter, num_seqs, min_tokens,
    SEQS: tl.constexpr, TOKENS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """One program a tile of TOKENS tokens: writes its record int32 [NUMBERS], late tiles first; after the last, length 0."""
    place = tl.program_id(0)
    seqs = tl.arange(0, SEQS)
    counts = tl.load(query_lens + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    total = tl.sum(tl.where(counts >= min_tokens, tl.cdiv(counts, TOKENS), 0), 0)
    seq, token, begin = tile_of(query_lens, num_seqs, min_tokens, tl.maximum(total - 1 - place, 0), SEQS, TOKENS)
    live = place < total
    seq = tl.where(live, seq, 0)
    length = tl.load(seq_lens + seq).to(tl.int32)
    count = tl.load(query_lens + seq).to(tl.int32)
    numbers = tl.arange(0, NUMBERS)
    record = tl.where(numbers == 0, seq, tl.where(numbers == 1, token + begin, length - count + begin))
    tl.store(records + place * NUMBERS + numbers, tl.where(live, tl.where(numbers == 3, length, record), 0))
    if place == 0:
        tl.store(counter, 0)


@gluon.jit
def _tile(records, number, num_tiles, kv_heads, plan, NUMBERS: gl.constexpr):
    """(tile number `number` of the launch, its sequence); its count is 0 after the last one.

    Of the tile, `batch` is the sequence's length, `m` the first of its tokens in the batch, and `at` that one's position.
    """
    live = number < num_tiles * kv_heads
    record = records + gl.minimum(number // kv_heads, num_tiles - 1) * NUMBERS
    seq = gl.load(record)
    token = gl.load(record + 1)
    low = gl.load(record + 2)
    length = gl.load(record + 3)
    live = live & (length > 0)
    end = gl.minimum(low + plan.BM // plan.GROUP, length)
    count = gl.where(live, (end - 1) // plan.BN + 1, 0)
    partial = gl.maximum(count - (low + 1) // plan.BN, 0)
    return Tile(length, number % kv_heads, token, count, partial, low, gl.maximum(count - 1, 0)), seq


@gluon.jit
def _load_tile(
    desc, table, head, n, slot, ready, free, tiles, BN: gl.constexpr, ROWS: gl.constexpr, PAGE: gl.constexpr
):
    """Loads the n-th tile of BN slots of the sequence whose pages `table` names."""
    STAGES: gl.constexpr = tiles.shape[0]
    D: gl.constexpr = tiles.shape[4]
    PANEL: gl.constexpr = desc.block_shape[3]
    COUNT: gl.constexpr = BN // ROWS
    PANELS: gl.constexpr = D // PANEL
    parts = tiles._reinterpret(tiles.dtype, [STAGES * PANELS * COUNT, 1, 1, ROWS, PANEL], desc.layout)
    b = slot % STAGES
    first = n * BN
    page = gl.load(table + first // PAGE)
    mbarrier.wait(free.index(b), ((slot // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(b), BN * D * 2)
    for part in gl.static_range(COUNT):
        # A part past the sequence's last page reads the page of the table's padding, whose slots are masked.
        if part > 0 and part * ROWS % PAGE == 0:
            page = gl.load(table + (first + part * ROWS) // PAGE)
        for panel in gl.static_range(PANELS):
            into = parts.index((b * PANELS + panel) * COUNT + part)
            tma_load(desc, [page, head, (first + part * ROWS) % PAGE, panel * PANEL], ready.index(b), into)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, table, table_row, records, counter, num_tiles, kv_heads, mem, plan,
    ROWS: gl.constexpr, PAGE: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """The loading warp, as `gluon_loads.produce`: tiles of the list in place of tiles of a batch, pages in place of rows."""
    slot = 0
    turn = 0
    number = gl.program_id(0) - gl.num_programs(0)
    tile, seq = _tile(records, gl.program_id(0), num_tiles, kv_heads, plan, NUMBERS)
    # Read again: Triton 3.6 carries through a loop only names whose value changes in it (see `gluon_loads.produce`).
    last, last_seq = _tile(records, gl.program_id(0), num_tiles, kv_heads, plan, NUMBERS)
    last_head = last.head
    last_n = 0
    while tile.count > 0:
        publish(tile, turn, mem)
        for part in gl.static_range(mem.PARTS):
            i = turn % mem.Q_STAGES * mem.PARTS + part
            mbarrier.wait(mem.q_free.index(i), ((turn // mem.Q_STAGES) & 1) ^ 1)
            mbarrier.expect(mem.q_ready.index(i), q_desc.block_type.nbytes)
            token = tile.m + part * (64 // plan.GROUP)
            tma_load(q_desc, [0, token, tile.head * plan.GROUP, 0], mem.q_ready.index(i), mem.q.index(i))
        turn += 1
        ahead, ahead_seq = _tile(records, drawn(number) + 2 * gl.num_programs(0), num_tiles, kv_heads, plan, NUMBERS)
        number = draw(counter)
        for j in range(tile.count):
            n = tile.count - 1 - j
            _load_tile(
                k_desc, table + seq.to(gl.int64) * table_row, tile.head, n, slot, mem.k_ready, mem.k_free, mem.k,
                plan.BN, ROWS, PAGE,
            )  # fmt: skip
            if slot > 0:
                _load_tile(
                    v_desc, table + last_seq.to(gl.int64) * table_row, last_head, last_n, slot - 1, mem.v_ready,
                    mem.v_free, mem.v, plan.BN, ROWS, PAGE,
                )  # fmt: skip
            slot += 1
            last_n = n
            last_seq = seq
            last_head = tile.head
        tile = ahead
        seq = ahead_seq
    publish(tile, turn, mem)
    if slot > 0:
        _load_tile(
            v_desc, table + last_seq.to(gl.int64) * table_row, last_head, last_n, slot - 1, mem.v_ready, mem.v_free,
            mem.v, plan.BN, ROWS, PAGE,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tiles", "kv_heads", "table_row"])
def paged_forward(
    q_desc, k_desc, v_desc, out, table, records, counter, num_tiles, kv_heads, table_row, scale_log2,
    GROUP: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    PAGE: gl.constexpr, NUMBERS: gl.constexpr, PARTS: gl.constexpr, Q_REG: gl.constexpr, REGS: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor; see the module. Writes `out` [T, H, D] of the listed tiles' tokens."""
    layout: gl.constexpr = k_desc.layout
    Q_SLOTS: gl.constexpr = PARTS if Q_REG else 2 * PARTS
    none = records
    zero = num_tiles * 0
    plan = Plan(
        zero, zero, kv_heads * GROUP, zero, zero, num_tiles, zero, none, none, zero, zero, none, zero, zero, none, zero,
        zero, scale_log2, scale_log2, scale_log2,
        "paged", None, None, (), (False, False), GROUP, 64 * PARTS, BN, False,
    )  # fmt: skip
    mem = Buffers(
        gl.allocate_shared_memory(q_desc.dtype, [Q_SLOTS, 1, 64 // GROUP, GROUP, D], q_desc.layout),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BN, 1, D], layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BN, 1, D], layout),
        gl.allocate_shared_memory(q_desc.dtype, [PARTS, 1, 8, 1, D], layout),
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
            (consume, (out, none, mem, plan, 0, Q_REG, TURNS)),
            (consume, (out, none, mem, plan, 1, Q_REG, TURNS)),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, table, table_row, records, counter, num_tiles, kv_heads, mem, plan,
                    ROWS, PAGE, NUMBERS,
                ),
            ),
        ],
        [4, 1],
        [REGS, 24],
    )  # fmt: skip


def fits(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether the kernel takes these: 16-bit heads of 64 or 128, 1 to 64 heads of a key's (a power of two), pages of 16, 32 ... slots."""
    (_, heads, head_dim), (_, kv_heads, page_size, v_dim) = q.shape, v_pages.shape
    group = heads // kv_heads
    usual = head_dim == v_dim in (64, 128) and q.dtype == k_pages.dtype
    powers = group <= 64 and not group & (group - 1) and page_size >= 16 and not page_size & (page_size - 1)
    return usual and powers and all(map(_aligned, (q, k_pages, v_pages)))


def _aligned(x: Tensor) -> bool:
    """Whether rows are contiguous and 16-byte aligned."""
    starts = (x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(start * x.element_size() % 16 == 0 for start in starts)


def launch(
    out: Tensor,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor,
    min_tokens: int,
    scale: float,
    num_sms: int,
) -> None:
    """Writes `out` [T, H, D] for the sequences of at least `min_tokens` new tokens; others are not written. See `fits`."""
    num_tokens, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group, num_seqs = heads // kv_heads, len(seq_lens)
    config, tokens = tile_config(head_dim), 64 * PARTS // group
    tiles = triton.cdiv(num_tokens, tokens) + min(num_seqs, num_tokens // max(1, min_tokens))
    records = torch.empty(tiles + 1, _NUMBERS, dtype=torch.int32, device=q.device)
    list_tiles[(tiles,)](
        query_lens, seq_lens, records, records[tiles], num_seqs, min_tokens,
        SEQS=max(16, triton.next_power_of_2(num_seqs)), TOKENS=tokens, NUMBERS=_NUMBERS, num_warps=4,
    )  # fmt: skip
    rows = min(page_size, config.block_n)
    paged_forward[(min(tiles * kv_heads, num_sms),)](
        boxes(q[None], 1, 64 // group, group, head_dim), boxes(k_pages, 1, 1, rows, 64), boxes(v_pages, 1, 1, rows, 64),
        out, page_table, records, records[tiles], tiles, kv_heads, page_table.stride(0), scale * _LOG2E,
        GROUP=group, STAGES=config.stages, BN=config.block_n, D=head_dim, ROWS=rows, PAGE=page_size, NUMBERS=_NUMBERS,
        PARTS=PARTS, Q_REG=config.q_in_registers, REGS=REGISTERS, TURNS=config.turns,
        num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
