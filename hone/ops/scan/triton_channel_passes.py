"""Passes through the chunks of a segment in order: states, outputs, gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.scan.triton_channel_chunks import FEW, Weighed, documents_of, edges, line_of, of_pairs, weigh
from hone.ops.scan.triton_kernels import Fall, Tiling, _block, _rows, _state_dtype, parts_of, prefix


@triton.jit
def _part_states(k_desc, v_desc, states, passes, through, seq_len, seg_chunks, num_segs, part_chunks, parts, heads,
                 share_k, share_v, dim_k, dim_v, tiles_v,
                 CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """As `hone.ops.scan.triton_kernels._part_states` of weighted keys (in reverse time: queries); `passes` [parts, Dk]."""
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
def _outputs(q_desc, k_desc, v_desc, pairs_desc, mixed, starts, final, through, scale, seq_len, seg_chunks, num_segs,
             heads, share_v, dim_k, dim_v, start_place, start_k, start_v, tiles_v,
             CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, REVERSE: tl.constexpr,
             STARTS: tl.constexpr, STATE_DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """As `hone.ops.scan.triton_kernels._outputs` of weighted queries and keys (in reverse time: keys and queries) and pairs."""
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
        # No descriptor here: its buffer would leave no room for a second program.
        tokens = first + tl.arange(0, CHUNK)[:, None]
        into = mixed + ((batch.to(tl.int64) * seq_len + tokens) * heads + head) * dim_v + columns
        tl.store(into, out.to(v.dtype), mask=(tokens < seq_len) & (columns < dim_v))
    last = seg == (0 if REVERSE else num_segs - 1)
    last_into = final + line.to(tl.int64) * dim_k * dim_v + rows * dim_v + columns
    tl.store(last_into, state, mask=inside & last)


@triton.jit
def _gradients(rows_desc, columns_desc, weighed_desc, fallen_desc, within_desc, with_desc, out_desc, change_desc, starts,
               fallen, through, later, reset, scale, seq_len, seg_chunks, num_segs, heads, share_rows, share_columns,
               dim_v, dim_k, start_place, start_v, start_k, tiles, reset_b,
               CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, RESET: tl.constexpr,
               REVERSE: tl.constexpr, STARTS: tl.constexpr, CHANGES: tl.constexpr, STATE_DTYPE: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """dq (in reverse time: dk) of one segment for BLOCK_K channels, the transposed state carried along.

    CHANGES: dq's pass also adds the state's term to q * dq - k * dk (`with_desc`: weighted queries); dk's pass (weighted keys)
    sums these over later tokens, which is the gradient of the log decays; `later` [B, H, segments, Dk] is the sum over later
    segments.
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
        values = tl.arange(0, BLOCK_V)[:, None]
        begins_at = starts + place.to(tl.int64) * start_place + values * start_v + channels[None, :] * start_k
        state = tl.load(begins_at, mask=(values < dim_v) & (channels[None, :] < dim_k), other=0.0)
    at = line_of(fallen, batch, head, seq_len, heads, dim_k)
    if CHANGES and REVERSE:
        sum_later = tl.load(later + place * dim_k + channels, mask=channels < dim_k, other=0.0)
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = begin + (count - 1 - step if REVERSE else step)
        first = chunk * CHUNK
        rows = rows_desc.load([batch, head // share_rows, first, 0]).reshape(CHUNK, BLOCK_V)
        columns = columns_desc.load([batch, head // share_columns, first, 0]).reshape(CHUNK, BLOCK_V)
        weighed = weighed_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K)
        here = fallen_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K)
        falls = tl.load(through + (line * chunks + chunk) * dim_k + channels, mask=channels < dim_k, other=0.0)
        document, documents = documents_of(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        out = tl.dot(rows.to(STATE_DTYPE), state.to(STATE_DTYPE), input_precision="ieee")
        add = within_desc.load([batch, head, first, channel]).reshape(CHUNK, BLOCK_K)
        weight = edges(here, at, first, channels[None, :], document, documents, seq_len, heads, dim_k,
                          CHUNK, RESET, REVERSE)  # fmt: skip
        out *= scale
        into = [batch, head, first, channel]
        out_desc.store(into, (out * weight + add).to(out_desc.dtype).reshape(1, 1, CHUNK, BLOCK_K))
        state = tl.dot(tl.trans(columns), weighed, state * falls[None, :], input_precision="ieee")
        if CHANGES:
            change = change_desc.load(into).reshape(CHUNK, BLOCK_K)
            other = with_desc.load(into).reshape(CHUNK, BLOCK_K)
            if REVERSE:
                change -= out * other.to(tl.float32)
                after = tl.sum(change, 0)
                change = tl.cumsum(change, 0, reverse=True) + sum_later[None, :]
                sum_later += after
                if RESET:  # a decay at a reset has no effect, so no gradient
                    tokens = first + tl.arange(0, CHUNK)
                    begins = tl.load(reset + batch * reset_b + tokens, mask=tokens < seq_len, other=0)
                    change = tl.where((begins != 0)[:, None], 0.0, change)
            else:
                change += out * other.to(tl.float32)
            change_desc.store(into, change.reshape(1, 1, CHUNK, BLOCK_K))


def _segment_states(
    k: Tensor, v: Tensor, heads: int, plan: Tiling, initial: Tensor | None, through: Tensor, *, reverse: bool = False
) -> Tensor:
    """As `hone.ops.scan.triton_kernels.segment_states`, of weighted keys, in reverse time queries."""
    states, _, grid, given, options = parts_of(k, v, heads, plan)
    passes = states.new_empty(states.shape[:2])
    if len(states):
        _part_states[grid](*given[:2], states, passes, through, *given[2:], REVERSE=reverse, STAGES=3, **options)
    return prefix(states, passes, initial, k.shape[0], heads, plan, reverse)


def _mixed(
    weighed: Weighed, v: Tensor, scale: float, plan: Tiling, starts: Tensor | None, final: Tensor, reverse: bool = False
) -> Tensor:
    """Outputs [B, S, H, Dv] of values v, or in reverse time dv of d_out = v; fills `final` [B, H, Dk, Dv]."""
    batch, seq_len, heads, dim_k = weighed.queries.shape
    dim_v = v.shape[-1]
    rows, keys = (weighed.keys, weighed.queries) if reverse else (weighed.queries, weighed.keys)
    out = v.new_empty((batch, seq_len, heads, dim_v))
    chunk, block_k = plan.chunk, _block(dim_k)
    block_v = min(_block(dim_v), plan.block_v if block_k <= 128 else 32)  # a wider state would not fit in registers
    tiles_v = triton.cdiv(dim_v, block_v)
    of_starts = (0, 0, 0) if starts is None else starts.stride()[2:]
    _outputs[(batch * heads * plan.segments * tiles_v,)](
        _rows(rows, chunk, block_k), _rows(keys, chunk, block_k), _rows(v, chunk, block_v),
        _rows(weighed.pairs, chunk, chunk), out, starts, final, weighed.through, scale, seq_len,
        plan.segment_tokens(seq_len) // chunk, plan.segments, heads, heads // v.shape[2], dim_k, dim_v, *of_starts, tiles_v,
        CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=block_v, REVERSE=reverse, STARTS=starts is not None,
        STATE_DTYPE=_state_dtype(v.dtype), STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, plan: Tiling, state: Tensor | None, fall: Fall,
    final: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out [B, S, H, Dv], initial state of each segment [B, H, segments, Dk, Dv] or None); fills `final` [B, H, Dk, Dv]."""
    weighed = weigh(q, k, heads, plan, fall)
    starts = None if state is None else state[:, :, None]
    if plan.segments > 1:
        starts = _segment_states(weighed.keys, v, heads, plan, state, weighed.through)
    return _mixed(weighed, v, scale, plan, starts, final), starts


def backward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, plan: Tiling, starts: Tensor | None, fall: Fall,
    final: Tensor, d_out: Tensor, d_final: Tensor, decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `hone.ops.scan.api.scan_backward`; `starts` [B, H, segments, Dk, Dv], None if a head is one segment without an initial state."""
    weighed = weigh(q, k, heads, plan, fall)
    ends = _segment_states(weighed.queries, d_out, heads, plan, d_final / scale, weighed.through, reverse=True)
    d_state = torch.empty_like(final)
    dv = _mixed(weighed, d_out, scale, plan, ends, d_state, reverse=True)
    later = None
    if decays:
        later = torch.zeros_like(ends[..., 0])
        if plan.segments > 1:
            later[:, :, :-1] = (starts[:, :, 1:] * ends[:, :, :-1]).sum(-1) * scale
        later[:, :, -1] = (final * d_final).sum(-1)
    batch, seq_len, chunk, reset = len(q), q.shape[1], plan.chunk, fall.reset
    dim_k, dim_v = final.shape[2:]
    block_v, block_k = _block(dim_v), min(_block(dim_k), FEW)
    of_queries, of_keys, change = of_pairs(q, k, v, d_out, scale, plan, weighed.fallen, reset, decays)

    def gradient(rows, columns, weights, within, other, states, reverse):
        out = torch.empty_like(other)
        of_states = (0, 0, 0) if states is None else states.stride()[2:]
        _gradients[(batch * heads * plan.segments * triton.cdiv(dim_k, block_k),)](
            _rows(rows, chunk, block_v), _rows(columns, chunk, block_v),
            *(_rows(x, chunk, block_k) for x in (weights, weighed.fallen, within, other, out, change)),
            states, weighed.fallen, weighed.through, later, reset, scale, seq_len, plan.segment_tokens(seq_len) // chunk,
            plan.segments, heads, heads // rows.shape[2], heads // columns.shape[2], dim_v, dim_k, *of_states, triton.cdiv(dim_k, block_k),
            0 if reset is None else reset.stride(0),
            CHUNK=chunk, BLOCK_V=block_v, BLOCK_K=block_k, RESET=reset is not None, REVERSE=reverse,
            STARTS=states is not None, CHANGES=decays, STATE_DTYPE=_state_dtype(q.dtype), STAGES=1,
            num_warps=4 if block_v <= 128 else 8,
        )  # fmt: skip
        return out

    turned = None if starts is None else starts.transpose(-1, -2)
    dq = gradient(d_out, v, weighed.keys, of_queries, weighed.queries, turned, False)
    dk = gradient(v, d_out, weighed.queries, of_keys, weighed.keys, ends.transpose(-1, -2), True)
    return dq, dk, dv, d_state.mul_(scale), change if decays else d_state.new_empty(0)
