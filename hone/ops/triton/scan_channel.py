"""Scan with a decay a key channel (gated linear attention, arXiv:2312.06635): the passes of `hone.ops.triton.scan` for it.

The weight exp(c_s - c_t) of a pair differs in every channel, so it must be multiplied into queries and keys before their
product, and exp(-c_t) alone may overflow. Every pair of a chunk is split where the larger power-of-two block between them
has its middle: exp(c_s - c_mid) exp(c_mid - c_t), both factors at most 1 whatever the decays. A chunk of 2^n tokens takes n
masked products, one a block size. (The paper's own cut, blocks of 16 and pairs one by one within, needs no fewer operations.)

All that no state enters is done first, every chunk on its own and all at once: the pairs' weights within chunks, queries
weighted by what their chunk's incoming state has lost, keys by what they lose until its end. What goes through the chunks
in order is then three products a chunk and no exponential. The gradient of the decays is summed from products in float32
of unrounded dq and dk: it is a small difference of large sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.triton.scan import Fall, Tiling, _block, _rows, _state_dtype, parts_of, prefix

FEW = 32
"""Channels taken at a time where a chunk's weights of all channels would not fit in registers."""


@triton.jit
def _documents(reset, batch, first, seq_len, reset_b, CHUNK: tl.constexpr, RESET: tl.constexpr):
    """How many documents begin from the chunk's start up to each token, and in all."""
    rows = first + tl.arange(0, CHUNK)
    if RESET:
        begins = tl.load(reset + batch * reset_b + rows, mask=rows < seq_len, other=0).to(tl.int32)
        return tl.cumsum(begins, 0), tl.sum(begins, 0)
    return tl.zeros([CHUNK], tl.int32), 0


@triton.jit
def _since_start(steps, document, RESET: tl.constexpr):
    """What the chunk's incoming state weighs in each token, a channel each, of log decays `steps` [CHUNK, channels]."""
    weight = tl.exp(tl.cumsum(steps, 0))
    return tl.where((document == 0)[:, None], weight, 0.0) if RESET else weight


@triton.jit
def _until_end(steps, document, documents, RESET: tl.constexpr):
    """What each token weighs in the chunk's outgoing state."""
    weight = tl.exp(tl.sum(steps, 0)[None, :] - tl.cumsum(steps, 0))
    return tl.where((document == documents)[:, None], weight, 0.0) if RESET else weight


@triton.jit
def _from_middle(steps, HALF: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """exp(-|c - c_mid|) with the middle of each token's block of 2 HALF tokens, c the cumulative log decay."""
    if HALF == 1:
        later = (tl.arange(0, CHUNK) % 2 == 1)[:, None]
        return tl.where(later, tl.exp(steps), 1.0)
    halves = tl.reshape(steps, (CHUNK // HALF, HALF, WIDTH))
    fallen = tl.cumsum(halves, 1)
    whole = tl.sum(halves, 1)
    later = (tl.arange(0, CHUNK // HALF) % 2 == 1)[:, None, None]
    return tl.reshape(tl.exp(tl.where(later, fallen, whole[:, None, :] - fallen)), (CHUNK, WIDTH))


@triton.jit
def _across(HALF: tl.constexpr, CHUNK: tl.constexpr):
    """[row, column]: whether the column is in the first half of a block of 2 HALF tokens, the row in its second."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    return (((row // HALF) ^ (column // HALF)) == 1) & (column < row)


@triton.jit
def _weigh(q_desc, k_desc, g_desc, queries_desc, keys_desc, pairs_desc, through, reset, seq_len, chunks, heads,
           share_q, share_k, dim_k, reset_b,
           CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, FEW: tl.constexpr, LEVELS: tl.constexpr,
           RESET: tl.constexpr):  # fmt: skip
    """Of one chunk of one head: `Weighed`, FEW channels at a time."""
    place = tl.program_id(0)
    batch = place // chunks // heads
    head = place // chunks % heads
    first = place % chunks * CHUNK
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    document, documents = _documents(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for channel in range(0, BLOCK_K, FEW):
        q = q_desc.load([batch, head // share_q, first, channel]).reshape(CHUNK, FEW)
        k = k_desc.load([batch, head // share_k, first, channel]).reshape(CHUNK, FEW)
        steps = g_desc.load([batch, head, first, channel]).reshape(CHUNK, FEW).to(tl.float32)
        same = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        pairs += tl.where(row == column, same[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            near = _from_middle(steps, 1 << level, CHUNK, FEW)
            product = tl.dot((q * near).to(q.dtype), tl.trans((k * near).to(q.dtype)), input_precision="ieee")
            pairs += tl.where(_across(1 << level, CHUNK), product, 0.0)
        query = (q * _since_start(steps, document, RESET)).to(queries_desc.dtype)
        queries_desc.store([batch, head, first, channel], query.reshape(1, 1, CHUNK, FEW))
        key = (k * _until_end(steps, document, documents, RESET)).to(keys_desc.dtype)
        keys_desc.store([batch, head, first, channel], key.reshape(1, 1, CHUNK, FEW))
        passes = tl.exp(tl.sum(steps, 0))
        if RESET:
            passes = tl.where(documents == 0, passes, 0.0)
        channels = channel + tl.arange(0, FEW)
        tl.store(through + place * dim_k + channels, passes, mask=channels < dim_k)
    if RESET:
        pairs = tl.where(document[:, None] == document[None, :], pairs, 0.0)
    pairs_desc.store([batch, head, first, 0], pairs.to(pairs_desc.dtype).reshape(1, 1, CHUNK, CHUNK))


@triton.jit
def _part_states(k_desc, v_desc, states, passes, through, seq_len, seg_chunks, num_segs, part_chunks, parts, heads,
                 share_k, share_v, dim_k, dim_v, tiles_v,
                 CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """As `hone.ops.triton.scan._part_states` of weighted keys (in reverse time: queries); `passes` [parts, Dk]."""
    place = tl.program_id(0)
    line = place // ((num_segs - 1) * parts)
    seg = place // parts % (num_segs - 1) + (1 if REVERSE else 0)
    batch = line // heads
    head = line % heads
    tile_k = tl.program_id(1) // tiles_v
    tile_v = tl.program_id(1) % tiles_v
    chunks = tl.cdiv(seq_len, CHUNK)
    begin = seg * seg_chunks + place % parts * part_chunks
    count = tl.minimum(part_chunks, tl.minimum((seg + 1) * seg_chunks, chunks) - begin)
    rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    survives = tl.full([BLOCK_K], 1.0, tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = begin + (count - 1 - step if REVERSE else step)
        k = k_desc.load([batch, head // share_k, chunk * CHUNK, tile_k * BLOCK_K]).reshape(CHUNK, BLOCK_K)
        v = v_desc.load([batch, head // share_v, chunk * CHUNK, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
        falls = tl.load(through + (line * chunks + chunk) * dim_k + rows, mask=rows < dim_k, other=0.0)
        survives *= falls
        state = tl.dot(tl.trans(k), v, state * falls[:, None], input_precision="ieee")
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    into = states + place.to(tl.int64) * dim_k * dim_v + rows[:, None] * dim_v + columns
    tl.store(into, state, mask=(rows[:, None] < dim_k) & (columns < dim_v))
    if tile_v == 0:
        tl.store(passes + place * dim_k + rows, survives, mask=rows < dim_k)


@triton.jit
def _outputs(q_desc, k_desc, v_desc, pairs_desc, out_desc, starts, final, through, scale, seq_len, seg_chunks, num_segs,
             heads, share_v, dim_k, dim_v, start_place, start_k, start_v, tiles_v,
             CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr,
             STARTS: tl.constexpr, STATE_DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """As `hone.ops.triton.scan._outputs` of weighted queries and keys (in reverse time: keys and queries) and pairs."""
    tile_v = tl.program_id(0) % tiles_v
    place = tl.program_id(0) // tiles_v
    seg = place % num_segs
    line = place // num_segs
    batch = line // heads
    head = line % heads
    chunks = tl.cdiv(seq_len, CHUNK)
    begin = seg * seg_chunks
    count = tl.minimum(seg_chunks, chunks - begin)
    channels = tl.arange(0, BLOCK_K)
    rows = channels[:, None]
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (rows < dim_k) & (columns < dim_v)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if STARTS:
        at = starts + place.to(tl.int64) * start_place + rows * start_k + columns * start_v
        state = tl.load(at, mask=inside, other=0.0)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = begin + (count - 1 - step if REVERSE else step)
        first = chunk * CHUNK
        q = q_desc.load([batch, head, first, 0]).reshape(CHUNK, BLOCK_K)
        k = k_desc.load([batch, head, first, 0]).reshape(CHUNK, BLOCK_K)
        v = v_desc.load([batch, head // share_v, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
        pairs = pairs_desc.load([batch, head, first, 0]).reshape(CHUNK, CHUNK)
        falls = tl.load(through + (line * chunks + chunk) * dim_k + channels, mask=channels < dim_k, other=0.0)
        out = tl.dot(q.to(STATE_DTYPE), state.to(STATE_DTYPE), input_precision="ieee")
        out = tl.dot(tl.trans(pairs) if REVERSE else pairs, v, out, input_precision="ieee") * scale
        state = tl.dot(tl.trans(k), v, state * falls[:, None], input_precision="ieee")
        out_desc.store([batch, head, first, tile_v * BLOCK_V], out.to(out_desc.dtype).reshape(1, 1, CHUNK, BLOCK_V))
    last = seg == (0 if REVERSE else num_segs - 1)
    into = final + line.to(tl.int64) * dim_k * dim_v + rows * dim_v + columns
    tl.store(into, state, mask=inside & last)


@triton.jit
def _within(q_desc, k_desc, v_desc, g_desc, d_out_desc, dq_desc, dk_desc, reset, seq_len, chunks, heads,
            share_q, share_k, share_v, reset_b,
            CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr,
            LEVELS: tl.constexpr, RESET: tl.constexpr):  # fmt: skip
    """Of one chunk of one head: what its own pairs add to dq and dk, scale apart, float32."""
    place = tl.program_id(0)
    batch = place // chunks // heads
    head = place // chunks % heads
    first = place % chunks * CHUNK
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for at in range(0, BLOCK_V, WIDE):
        d_out = d_out_desc.load([batch, head, first, at]).reshape(CHUNK, WIDE)
        v = v_desc.load([batch, head // share_v, first, at]).reshape(CHUNK, WIDE)
        pairs = tl.dot(d_out, tl.trans(v), pairs, input_precision="ieee")
    if RESET:
        document, _ = _documents(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        pairs = tl.where(document[:, None] == document[None, :], pairs, 0.0)
    same = tl.sum(tl.where(row == column, pairs, 0.0), 1)[:, None]
    for channel in range(0, BLOCK_K, FEW):
        q = q_desc.load([batch, head // share_q, first, channel]).reshape(CHUNK, FEW)
        k = k_desc.load([batch, head // share_k, first, channel]).reshape(CHUNK, FEW)
        steps = g_desc.load([batch, head, first, channel]).reshape(CHUNK, FEW).to(tl.float32)
        dq = same * k.to(tl.float32)
        dk = same * q.to(tl.float32)
        for level in tl.static_range(LEVELS):
            near = _from_middle(steps, 1 << level, CHUNK, FEW)
            part = tl.where(_across(1 << level, CHUNK), pairs, 0.0).to(q.dtype)
            dq += near * tl.dot(part, (k * near).to(q.dtype), input_precision="ieee")
            dk += near * tl.dot(tl.trans(part), (q * near).to(q.dtype), input_precision="ieee")
        dq_desc.store([batch, head, first, channel], dq.reshape(1, 1, CHUNK, FEW))
        dk_desc.store([batch, head, first, channel], dk.reshape(1, 1, CHUNK, FEW))


@triton.jit
def _gradients(rows_desc, columns_desc, weighed_desc, g_desc, within_desc, with_desc, out_desc, change_desc, starts,
               through, later, reset, scale, seq_len, seg_chunks, num_segs, heads, share_rows, share_columns, share_with,
               dim_v, dim_k, start_place, start_v, start_k, tiles, reset_b,
               CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, RESET: tl.constexpr,
               REVERSE: tl.constexpr, STARTS: tl.constexpr, CHANGES: tl.constexpr, STATE_DTYPE: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """dq (in reverse time: dk) of one segment for BLOCK_K channels, the transposed state carried along.

    CHANGES: dq also leaves q * dq in float32, and dk turns it into the gradient of the log decays: sums of q * dq - k * dk
    over what comes after a token, `later` [B, H, segments, Dk] being the sum over later segments.
    """
    tile = tl.program_id(0) % tiles
    place = tl.program_id(0) // tiles
    seg = place % num_segs
    line = place // num_segs
    batch = line // heads
    head = line % heads
    chunks = tl.cdiv(seq_len, CHUNK)
    begin = seg * seg_chunks
    count = tl.minimum(seg_chunks, chunks - begin)
    channel = tile * BLOCK_K
    channels = channel + tl.arange(0, BLOCK_K)
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if STARTS:
        rows = tl.arange(0, BLOCK_V)[:, None]
        at = starts + place.to(tl.int64) * start_place + rows * start_v + channels[None, :] * start_k
        state = tl.load(at, mask=(rows < dim_v) & (channels[None, :] < dim_k), other=0.0)
    if CHANGES and REVERSE:
        sum_later = tl.load(later + place * dim_k + channels, mask=channels < dim_k, other=0.0)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = begin + (count - 1 - step if REVERSE else step)
        first = chunk * CHUNK
        rows = rows_desc.load([batch, head // share_rows, first, 0]).reshape(CHUNK, BLOCK_V)
        columns = columns_desc.load([batch, head // share_columns, first, 0]).reshape(CHUNK, BLOCK_V)
        weighed = weighed_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K)
        steps = g_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K).to(tl.float32)
        falls = tl.load(through + (line * chunks + chunk) * dim_k + channels, mask=channels < dim_k, other=0.0)
        document, documents = _documents(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        out = tl.dot(rows.to(STATE_DTYPE), state.to(STATE_DTYPE), input_precision="ieee")
        if REVERSE:
            out *= _until_end(steps, document, documents, RESET)
        else:
            out *= _since_start(steps, document, RESET)
        state = tl.dot(tl.trans(columns), weighed, state * falls[None, :], input_precision="ieee")
        out = (out + within_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K)) * scale
        out_desc.store([batch, head, first, channel], out.to(out_desc.dtype).reshape(1, 1, CHUNK, BLOCK_K))
        if CHANGES:
            other = with_desc.load([batch, head // share_with, first, channel]).reshape(CHUNK, BLOCK_K)
            change = out * other.to(tl.float32)
            if REVERSE:
                change = change_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K) - change
                after = tl.sum(change, 0)
                change = tl.cumsum(change, 0, reverse=True) + sum_later[None, :]
                sum_later += after
                if RESET:  # a decay that a reset undoes has no gradient
                    tokens = first + tl.arange(0, CHUNK)
                    begins = tl.load(reset + batch * reset_b + tokens, mask=tokens < seq_len, other=0)
                    change = tl.where((begins != 0)[:, None], 0.0, change)
            change_desc.store([batch, head, first, channel], change.reshape(1, 1, CHUNK, BLOCK_K))


@dataclass(frozen=True)
class Weighed:
    """What of a scan no state enters, c being log decays summed within a chunk; zero where documents differ.

    queries q_s exp(c_s) and keys k_t exp(c_end - c_t), both [B, S, H, Dk]; pairs (sum_d q_s k_t exp(c_s - c_t), t <= s)
    [B, S, H, chunk]; through exp(c_end) [B, H, chunks, Dk] float32.
    """

    queries: Tensor
    keys: Tensor
    pairs: Tensor
    through: Tensor


def weigh(q: Tensor, k: Tensor, heads: int, plan: Tiling, fall: Fall) -> Weighed:
    """`Weighed` of q [B, S, H_q, Dk] and k [B, S, H_k, Dk]."""
    batch, seq_len, _, dim_k = q.shape
    chunk, chunks, block_k = plan.chunk, triton.cdiv(seq_len, plan.chunk), _block(dim_k)
    few = min(block_k, FEW)
    made = Weighed(
        q.new_empty((batch, seq_len, heads, dim_k)),
        k.new_empty((batch, seq_len, heads, dim_k)),
        q.new_empty((batch, seq_len, heads, chunk)),
        q.new_empty((batch, heads, chunks, dim_k), dtype=torch.float32),
    )
    _weigh[(batch * heads * chunks,)](
        _rows(q, chunk, few), _rows(k, chunk, few), _rows(fall.decay, chunk, few), _rows(made.queries, chunk, few),
        _rows(made.keys, chunk, few), _rows(made.pairs, chunk, chunk), made.through, fall.reset, seq_len, chunks, heads,
        heads // q.shape[2], heads // k.shape[2], dim_k, 0 if fall.reset is None else fall.reset.stride(0),
        CHUNK=chunk, BLOCK_K=block_k, FEW=few, LEVELS=chunk.bit_length() - 1, RESET=fall.reset is not None, num_warps=4,
        num_stages=1,
    )  # fmt: skip
    return made


def _segment_states(
    k: Tensor, v: Tensor, heads: int, plan: Tiling, initial: Tensor | None, through: Tensor, *, reverse: bool = False
) -> Tensor:
    """As `hone.ops.triton.scan.segment_states`, of weighted keys, in reverse time queries."""
    states, _, grid, given, options = parts_of(k, v, heads, plan)
    passes = states.new_empty(states.shape[:2])
    if len(states):
        _part_states[grid](*given[:2], states, passes, through, *given[2:], REVERSE=reverse, STAGES=3, **options)
    return prefix(states, passes, initial, k.shape[0], heads, plan, reverse)


def _mixed(
    weighed: Weighed, v: Tensor, scale: float, plan: Tiling, starts: Tensor | None, final: Tensor, reverse: bool = False
) -> Tensor:
    """Outputs [B, S, H, Dv] of values v, in reverse time what d_out = v makes dv; fills `final` [B, H, Dk, Dv]."""
    batch, seq_len, heads, dim_k = weighed.queries.shape
    dim_v = v.shape[-1]
    rows, keys = (weighed.keys, weighed.queries) if reverse else (weighed.queries, weighed.keys)
    out = v.new_empty((batch, seq_len, heads, dim_v))
    chunk, block_k = plan.chunk, _block(dim_k)
    block_v = min(_block(dim_v), plan.block_v)
    tiles_v = triton.cdiv(dim_v, block_v)
    of_starts = (0, 0, 0) if starts is None else starts.stride()[2:]
    _outputs[(batch * heads * plan.segments * tiles_v,)](
        _rows(rows, chunk, block_k), _rows(keys, chunk, block_k), _rows(v, chunk, block_v),
        _rows(weighed.pairs, chunk, chunk), _rows(out, chunk, block_v), starts, final, weighed.through, scale, seq_len,
        plan.segment_tokens(seq_len) // chunk, plan.segments, heads, heads // v.shape[2], dim_k, dim_v, *of_starts, tiles_v,
        CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=block_v, REVERSE=reverse, STARTS=starts is not None,
        STATE_DTYPE=_state_dtype(v.dtype), STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, plan: Tiling, state: Tensor | None, fall: Fall,
    final: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out [B, S, H, Dv], state each segment starts from [B, H, segments, Dk, Dv] or None); fills `final` [B, H, Dk, Dv]."""
    weighed = weigh(q, k, heads, plan, fall)
    if plan.segments == 1:
        begin = None if state is None else state[:, :, None]
        return _mixed(weighed, v, scale, plan, begin, final), None
    starts = _segment_states(weighed.keys, v, heads, plan, state, weighed.through)
    return _mixed(weighed, v, scale, plan, starts, final), starts


def _of_pairs(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, plan: Tiling, fall: Fall
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What pairs within chunks add to dq and dk, [B, S, H, Dk] float32, scale apart."""
    batch, seq_len, heads, dim_v = d_out.shape
    dim_k, chunk, chunks = q.shape[-1], plan.chunk, triton.cdiv(seq_len, plan.chunk)
    block_k, block_v = _block(dim_k), _block(dim_v)
    few, wide = min(block_k, FEW), min(block_v, 64)
    dq, dk = (q.new_empty((batch, seq_len, heads, dim_k), dtype=torch.float32) for _ in range(2))
    _within[(batch * heads * chunks,)](
        _rows(q, chunk, few), _rows(k, chunk, few), _rows(v, chunk, wide), _rows(fall.decay, chunk, few),
        _rows(d_out, chunk, wide), _rows(dq, chunk, few), _rows(dk, chunk, few), fall.reset, seq_len, chunks, heads,
        heads // q.shape[2], heads // k.shape[2], heads // v.shape[2],
        0 if fall.reset is None else fall.reset.stride(0),
        CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=block_v, FEW=few, WIDE=wide, LEVELS=chunk.bit_length() - 1,
        RESET=fall.reset is not None, num_warps=4, num_stages=1,
    )  # fmt: skip
    return dq, dk


def backward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, plan: Tiling, starts: Tensor | None, fall: Fall,
    final: Tensor, d_out: Tensor, d_final: Tensor, decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `hone.ops.recurrence.scan_backward`; `starts` [B, H, segments, Dk, Dv], None if a head starts from nothing."""
    weighed = weigh(q, k, heads, plan, fall)
    ends = _segment_states(weighed.queries, d_out, heads, plan, d_final / scale, weighed.through, reverse=True)
    d_state = torch.empty_like(final)
    dv = _mixed(weighed, d_out, scale, plan, ends, d_state, reverse=True)
    d_state *= scale
    later = change = None
    if decays:
        change = torch.empty_like(weighed.queries, dtype=torch.float32)
        later = torch.zeros_like(ends[..., 0])
        if plan.segments > 1:
            later[:, :, :-1] = (starts[:, :, 1:] * ends[:, :, :-1]).sum(-1) * scale
        later[:, :, -1] = (final * d_final).sum(-1)
    batch, seq_len, _, dim_k = q.shape
    dim_v, chunk = v.shape[-1], plan.chunk
    block_v = _block(dim_v)
    block_k = min(_block(dim_k), plan.block_v if block_v <= 128 else 32)
    tiles = triton.cdiv(dim_k, block_k)
    of_queries, of_keys = _of_pairs(q, k, v, d_out, plan, fall)

    def gradient(rows, columns, weights, within, other, states, reverse):
        out = other.new_empty(within.shape)
        of_states = (0, 0, 0) if states is None else states.stride()[2:]
        _gradients[(batch * heads * plan.segments * tiles,)](
            _rows(rows, chunk, block_v), _rows(columns, chunk, block_v), _rows(weights, chunk, block_k),
            _rows(fall.decay, chunk, block_k), _rows(within, chunk, block_k), _rows(other, chunk, block_k),
            _rows(out, chunk, block_k), _rows(within if change is None else change, chunk, block_k), states,
            weighed.through, later, fall.reset, scale, seq_len, plan.segment_tokens(seq_len) // chunk, plan.segments,
            heads, heads // rows.shape[2], heads // columns.shape[2], heads // other.shape[2], dim_v, dim_k, *of_states,
            tiles, 0 if fall.reset is None else fall.reset.stride(0),
            CHUNK=chunk, BLOCK_V=block_v, BLOCK_K=block_k, RESET=fall.reset is not None, REVERSE=reverse,
            STARTS=states is not None, CHANGES=decays, STATE_DTYPE=_state_dtype(q.dtype), STAGES=1, num_warps=plan.warps,
        )  # fmt: skip
        return out

    turned = None if starts is None else starts.transpose(-1, -2)
    dq = gradient(d_out, v, weighed.keys, of_queries, q, turned, False)
    dk = gradient(v, d_out, weighed.queries, of_keys, k, ends.transpose(-1, -2), True)
    return dq, dk, dv, d_state, d_state.new_empty(0) if change is None else change
