"""Scan with a decay a key channel (gated linear attention, arXiv:2312.06635): the passes of `hone.ops.triton.scan` for it.

The weight exp(c_s - c_t) of a pair differs in every channel, so it must be multiplied into queries and keys before their
product, and exp(-c_t) alone may overflow. Every pair of a chunk is split where the larger power-of-two block between them
has its middle: exp(c_s - c_mid) exp(c_mid - c_t), both factors at most 1 whatever the decays. A chunk of 2^n tokens takes n
masked products, one a block size. (The paper's own cut, blocks of 16 and pairs one by one within, needs no fewer operations.)
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hone.ops.triton.scan import Fall, Tiling, _block, _rows, _state_dtype, parts_of, prefix

CHUNK = 16
"""Tokens a chunk of the output pass: with 64 the six block sizes' weights do not fit in registers."""


@triton.jit
def _documents(reset, batch, first, seq_len, reset_b, CHUNK: tl.constexpr, RESET: tl.constexpr):
    """How many documents begin from the chunk's start up to each token, and in all."""
    rows = first + tl.arange(0, CHUNK)
    if RESET:
        begins = tl.load(reset + batch * reset_b + rows, mask=rows < seq_len, other=0).to(tl.int32)
        return tl.cumsum(begins, 0), tl.sum(begins, 0)
    return tl.zeros([CHUNK], tl.int32), 0


@triton.jit
def _edges(steps, document, documents, RESET: tl.constexpr, REVERSE: tl.constexpr):
    """(log decay since the chunk's start, what the incoming state weighs in a token, a token in the outgoing one, the
    incoming in the outgoing), a channel each, of log decays `steps` [CHUNK, channels]."""
    fallen = tl.cumsum(steps, 0)
    total = tl.sum(steps, 0)
    from_start = tl.exp(fallen)
    to_end = tl.exp(total[None, :] - fallen)
    through = tl.exp(total)
    if RESET:
        from_start = tl.where((document == 0)[:, None], from_start, 0.0)
        to_end = tl.where((document == documents)[:, None], to_end, 0.0)
        through = tl.where(documents == 0, through, 0.0)
    if REVERSE:
        return fallen, to_end, from_start, through
    return fallen, from_start, to_end, through


@triton.jit
def _from_middle(fallen, HALF: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """exp(-|c - c_mid|) with the middle of each token's block of 2 HALF tokens."""
    places = tl.arange(0, CHUNK)
    middle = places // (2 * HALF) * (2 * HALF) + HALF - 1
    at_middle = tl.gather(fallen, tl.broadcast_to(middle[:, None], (CHUNK, WIDTH)), 0)
    return tl.exp(-tl.abs(fallen - at_middle))


@triton.jit
def _across(HALF: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """[row, column]: whether they lie in different halves of one block, the column in the half that a row may see."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    split = (row // HALF) ^ (column // HALF)
    return (split == 1) & ((column > row) if REVERSE else (column < row))


@triton.jit
def _part_states(k_desc, v_desc, g_desc, states, passes, reset, seq_len, seg_chunks, num_segs, part_chunks, parts, heads,
                share_k, share_v, dim_k, dim_v, tiles_v, reset_b,
                CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, RESET: tl.constexpr,
                REVERSE: tl.constexpr):  # fmt: skip
    """As `hone.ops.triton.scan._part_states`; `passes` [parts, Dk]."""
    place = tl.program_id(0)
    row = place // ((num_segs - 1) * parts)
    seg = place // parts % (num_segs - 1) + (1 if REVERSE else 0)
    batch = row // heads
    head = row % heads
    tile_k = tl.program_id(1) // tiles_v
    tile_v = tl.program_id(1) % tiles_v
    end = tl.minimum((seg + 1) * seg_chunks, tl.cdiv(seq_len, CHUNK))
    begin = seg * seg_chunks + place % parts * part_chunks
    count = tl.minimum(part_chunks, end - begin)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    survives = tl.full([BLOCK_K], 1.0, tl.float32)
    for step in range(count):
        first = (begin + (count - 1 - step if REVERSE else step)) * CHUNK
        k = k_desc.load([batch, head // share_k, first, tile_k * BLOCK_K]).reshape(CHUNK, BLOCK_K)
        v = v_desc.load([batch, head // share_v, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
        steps = g_desc.load([batch, head, first, tile_k * BLOCK_K]).reshape(CHUNK, BLOCK_K).to(tl.float32)
        document, documents = _documents(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        _, _, leaves, through = _edges(steps, document, documents, RESET, REVERSE)
        state *= through[:, None]
        survives *= through
        state = tl.dot(tl.trans((k * leaves).to(v.dtype)), v, state, input_precision="ieee")
    rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    into = states + place.to(tl.int64) * dim_k * dim_v + rows[:, None] * dim_v + columns
    tl.store(into, state, mask=(rows[:, None] < dim_k) & (columns < dim_v))
    if tile_v == 0:
        tl.store(passes + place * dim_k + rows, survives, mask=rows < dim_k)


@triton.jit
def _decayed_scores(q_few, k_few, g_few, batch, head_q, head_k, head, first, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                    FEW: tl.constexpr, LEVELS: tl.constexpr, REVERSE: tl.constexpr):  # fmt: skip
    """sum_d q_sd k_td exp(c_sd - c_td) for what a row may see (in reverse time: exp(c_td - c_sd)), FEW channels at a time."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for channel in range(0, BLOCK_K, FEW):
        q = q_few.load([batch, head_q, first, channel]).reshape(CHUNK, FEW)
        k = k_few.load([batch, head_k, first, channel]).reshape(CHUNK, FEW)
        fallen = tl.cumsum(g_few.load([batch, head, first, channel]).reshape(CHUNK, FEW).to(tl.float32), 0)
        same = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
        scores += tl.where(row == column, same[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            near = _from_middle(fallen, 1 << level, CHUNK, FEW)
            product = tl.dot((q * near).to(q.dtype), tl.trans((k * near).to(q.dtype)), input_precision="ieee")
            scores += tl.where(_across(1 << level, CHUNK, REVERSE), product, 0.0)
    return scores


@triton.jit
def _decayed_values(scores, v, out, fallen, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, LEVELS: tl.constexpr,
                    REVERSE: tl.constexpr):  # fmt: skip
    """out + sum_t scores_st v_td exp(c_sd - c_td)."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    same = tl.sum(tl.where(row == column, scores, 0.0), 1)
    out += same[:, None] * v.to(tl.float32)
    for level in tl.static_range(LEVELS):
        near = _from_middle(fallen, 1 << level, CHUNK, BLOCK_V)
        part = tl.where(_across(1 << level, CHUNK, REVERSE), scores, 0.0)
        out += near * tl.dot(part.to(v.dtype), (v * near).to(v.dtype), input_precision="ieee")
    return out


@triton.jit
def _outputs(q_desc, k_desc, v_desc, g_desc, q_few, k_few, g_few, out_desc, starts, final, reset, scale, seq_len, seg_chunks, num_segs, heads,
             share_q, share_k, share_v, dim_k, dim_v, start_place, start_k, start_v, tiles_v, reset_b,
             CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FEW: tl.constexpr, LEVELS: tl.constexpr,
             ON_VALUES: tl.constexpr, RESET: tl.constexpr, REVERSE: tl.constexpr, STARTS: tl.constexpr,
             FINAL: tl.constexpr, STATE_DTYPE: tl.constexpr):  # fmt: skip
    """As `hone.ops.triton.scan._outputs`. ON_VALUES: the channels that decay are the values', not the keys'."""
    tile_v = tl.program_id(0) % tiles_v
    place = tl.program_id(0) // tiles_v
    seg = place % num_segs
    batch = place // num_segs // heads
    head = place // num_segs % heads
    begin = seg * seg_chunks
    count = tl.minimum(seg_chunks, tl.cdiv(seq_len, CHUNK) - begin)
    rows = tl.arange(0, BLOCK_K)[:, None]
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (rows < dim_k) & (columns < dim_v)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if STARTS:
        at = starts + place.to(tl.int64) * start_place + rows * start_k + columns * start_v
        state = tl.load(at, mask=inside, other=0.0)
    for step in range(count):
        first = (begin + (count - 1 - step if REVERSE else step)) * CHUNK
        q = q_desc.load([batch, head // share_q, first, 0]).reshape(CHUNK, BLOCK_K)
        k = k_desc.load([batch, head // share_k, first, 0]).reshape(CHUNK, BLOCK_K)
        v = v_desc.load([batch, head // share_v, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
        document, documents = _documents(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        if ON_VALUES:
            steps = g_desc.load([batch, head, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V).to(tl.float32)
            fallen, enters, leaves, through = _edges(steps, document, documents, RESET, REVERSE)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            out = tl.dot(q.to(STATE_DTYPE), state.to(STATE_DTYPE), input_precision="ieee") * enters
            if RESET:
                scores = tl.where(document[:, None] == document[None, :], scores, 0.0)
            out = _decayed_values(scores, v, out, fallen, CHUNK, BLOCK_V, LEVELS, REVERSE)
            state = tl.dot(tl.trans(k), (v * leaves).to(v.dtype), state * through[None, :], input_precision="ieee")
        else:
            scores = _decayed_scores(q_few, k_few, g_few, batch, head // share_q, head // share_k, head, first,
                                     CHUNK, BLOCK_K, FEW, LEVELS, REVERSE)  # fmt: skip
            steps = g_desc.load([batch, head, first, 0]).reshape(CHUNK, BLOCK_K).to(tl.float32)
            _, enters, leaves, through = _edges(steps, document, documents, RESET, REVERSE)
            out = tl.dot((q * enters).to(STATE_DTYPE), state.to(STATE_DTYPE), input_precision="ieee")
            if RESET:
                scores = tl.where(document[:, None] == document[None, :], scores, 0.0)
            out = tl.dot(scores.to(v.dtype), v, out, input_precision="ieee")
            weighted = tl.trans((k * leaves).to(v.dtype))
            state = tl.dot(weighted, v, state * through[:, None], input_precision="ieee")
        out_desc.store([batch, head, first, tile_v * BLOCK_V],
                       (out * scale).to(out_desc.dtype).reshape(1, 1, CHUNK, BLOCK_V))  # fmt: skip
    if FINAL:
        last = seg == (0 if REVERSE else num_segs - 1)
        into = final + (batch * heads + head).to(tl.int64) * dim_k * dim_v + rows * dim_v + columns
        tl.store(into, state, mask=inside & last)


def segment_states(
    k: Tensor, v: Tensor, heads: int, plan: Tiling, initial: Tensor | None, *, fall: Fall, reverse: bool = False
) -> Tensor:
    """As `hone.ops.triton.scan.segment_states`."""
    states, _, grid, given, options = parts_of(k, v, heads, plan)
    passes = states.new_empty(states.shape[:2])
    if len(states):
        _part_states[grid](
            *given[:2], _rows(fall.decay, plan.chunk, options["BLOCK_K"]), states, passes, fall.reset, *given[2:],
            0 if fall.reset is None else fall.reset.stride(0),
            RESET=fall.reset is not None, REVERSE=reverse, num_stages=1, **options,
        )  # fmt: skip
    return prefix(states, passes, initial, k.shape[0], heads, plan, reverse)


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    plan: Tiling,
    starts: Tensor | None,
    *,
    fall: Fall,
    turned: bool = False,
    reverse: bool = False,
    final: Tensor | None = None,
    dots_with: Any = None,
) -> tuple[Tensor, None]:
    """As `hone.ops.triton.scan.outputs`; `turned`: the decays [B, S, H, Dv] are those of the values' channels."""
    assert dots_with is None, "gradients of a channel's decays come from dq and dk themselves"
    batch, seq_len, _, dim_k = q.shape
    dim_v = v.shape[-1]
    out = v.new_empty((batch, seq_len, heads, dim_v))
    block_k = _block(dim_k)
    block_v = min(_block(dim_v), 32 if turned or block_k > 128 else 64)  # wider ones would not fit in registers
    tiles_v = triton.cdiv(dim_v, block_v)
    of_starts = (0, 0, 0) if starts is None else starts.stride()[2:]
    chunk, few = min(plan.chunk, CHUNK), min(block_k, 32)
    _outputs[(batch * heads * plan.segments * tiles_v,)](
        _rows(q, chunk, block_k), _rows(k, chunk, block_k), _rows(v, chunk, block_v),
        _rows(fall.decay, chunk, block_v if turned else block_k),
        _rows(q, chunk, few), _rows(k, chunk, few), _rows(fall.decay, chunk, few), _rows(out, chunk, block_v),
        starts, final, fall.reset, scale, seq_len, plan.segment_tokens(seq_len) // chunk, plan.segments, heads,
        heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], dim_k, dim_v, *of_starts, tiles_v,
        0 if fall.reset is None else fall.reset.stride(0),
        CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=block_v, FEW=few, LEVELS=chunk.bit_length() - 1, ON_VALUES=turned,
        RESET=fall.reset is not None, REVERSE=reverse, STARTS=starts is not None, FINAL=final is not None,
        STATE_DTYPE=_state_dtype(q.dtype), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, None
