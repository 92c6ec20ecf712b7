"""Chunked linear attention in Triton: states of whole segments, their prefix, then outputs chunk by chunk.

A head is divided into segments that run in parallel, each a sequence of chunks processed in order. Pass 1 reads keys and
values and writes the state that every segment adds; pass 2 sums them to each segment's initial state; pass 3 reads
everything again and writes outputs, with the running state [Dk, Dv] in float32 registers. With enough heads to fill the
GPU, one segment per head needs pass 3 only. (Chunk form: arXiv:2006.16236, 2307.08621, 2312.06635.)

Each kernel runs in both directions of time; the backward pass uses the reverse (see `hone.ops.scan.api.scan_backward`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hone.ops.compat import INTERPRETED

NO_DECAY, HEAD_DECAY, TOKEN_DECAY = 0, 1, 2


@triton.jit
def _decays(decay, reset, batch, head, first, seq_len, decay_b, decay_s, decay_h, reset_b, CHUNK: tl.constexpr,
            MODE: tl.constexpr, RESET: tl.constexpr):  # fmt: skip
    """For one chunk: log decay from its start up to and including each token, and in all; the number of resets likewise."""
    places = tl.arange(0, CHUNK)
    rows = first + places
    if MODE == 2:
        steps = tl.load(decay + batch * decay_b + rows * decay_s + head * decay_h, mask=rows < seq_len, other=0.0)
        steps = steps.to(tl.float32)
        fallen = tl.cumsum(steps, 0)
        total = tl.sum(steps, 0)
    elif MODE == 1:
        step = tl.load(decay + head * decay_h).to(tl.float32)
        inside = tl.minimum(seq_len - first, CHUNK)
        fallen = step * tl.minimum(places + 1, inside).to(tl.float32)
        total = step * inside.to(tl.float32)
    else:
        fallen = tl.zeros([CHUNK], tl.float32)
        total = 0.0
    if RESET:
        begins = tl.load(reset + batch * reset_b + rows, mask=rows < seq_len, other=0).to(tl.int32)
        document = tl.cumsum(begins, 0)
        documents = tl.sum(begins, 0)
    else:
        document = tl.zeros([CHUNK], tl.int32)
        documents = 0
    return fallen, total, document, documents


@triton.jit
def _edges(fallen, total, document, documents, RESET: tl.constexpr, REVERSE: tl.constexpr):
    """Weights (a, b, c): of the incoming state in each row, of each row in the outgoing state, of the incoming in the outgoing."""
    from_start = tl.exp(fallen)
    to_end = tl.exp(total - fallen)
    through = tl.exp(total)
    if RESET:
        from_start = tl.where(document == 0, from_start, 0.0)
        to_end = tl.where(document == documents, to_end, 0.0)
        through = tl.where(documents == 0, through, 0.0)
    if REVERSE:
        return to_end, from_start, through
    return from_start, to_end, through


@triton.jit
def _inside(scores, fallen, document, CHUNK: tl.constexpr, MODE: tl.constexpr, RESET: tl.constexpr,
            REVERSE: tl.constexpr):  # fmt: skip
    """Scores [row, column] of one chunk, decayed and masked."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    seen = (column >= row) if REVERSE else (column <= row)
    if RESET:
        seen = seen & (document[:, None] == document[None, :])
    if MODE != 0:
        fall = fallen[:, None] - fallen[None, :]
        fall = -fall if REVERSE else fall
        scores = scores * tl.exp(tl.where(seen, fall, 0.0))  # masked first: masked differences may overflow
    return tl.where(seen, scores, 0.0)


@triton.jit
def _part_states(k_desc, v_desc, states, passes, decay, reset, seq_len, seg_chunks, num_segs, part_chunks, parts, heads,
                 share_k, share_v, dim_k, dim_v, tiles_v, decay_b, decay_s, decay_h, reset_b,
                 CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MODE: tl.constexpr,
                 RESET: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Pass 1: the state [BLOCK_K, BLOCK_V] that a part of a segment adds, and the factor of an earlier state.

    For every segment but the last, whose state no other needs (in reverse time: but the first).
    """
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
    survives = 1.0
    for step in tl.range(0, count, num_stages=STAGES):
        first = (begin + (count - 1 - step if REVERSE else step)) * CHUNK
        k = k_desc.load([batch, head // share_k, first, tile_k * BLOCK_K]).reshape(CHUNK, BLOCK_K)
        v = v_desc.load([batch, head // share_v, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
        if MODE != 0 or RESET:
            fallen, total, document, documents = _decays(
                decay, reset, batch, head, first, seq_len, decay_b, decay_s, decay_h, reset_b, CHUNK, MODE, RESET
            )
            _, leaves, through = _edges(fallen, total, document, documents, RESET, REVERSE)
            state *= through
            survives *= through
            v = (v * leaves[:, None]).to(v.dtype)
        state = tl.dot(tl.trans(k), v, state, input_precision="ieee")
    rows = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    into = states + place.to(tl.int64) * dim_k * dim_v + rows * dim_v + columns
    tl.store(into, state, mask=(rows < dim_k) & (columns < dim_v))
    if tl.program_id(1) == 0:
        tl.store(passes + place, survives)


@triton.jit
def _prefix(states, passes, initial, starts, num_segs, parts, size, dim_v, INITIAL: tl.constexpr, REVERSE: tl.constexpr,
            CHANNELS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Pass 2: each segment's initial state from the parts' states."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    state = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        state = tl.load(initial + row * size + places, mask=inside, other=0.0)
    for step in range(num_segs):
        seg = num_segs - 1 - step if REVERSE else step
        tl.store(starts + (row * num_segs + seg) * size + places, state, mask=inside)
        if step < num_segs - 1:
            for part in range(parts):
                own = seg - 1 if REVERSE else seg
                at = (row * (num_segs - 1) + own) * parts + (parts - 1 - part if REVERSE else part)
                own_state = tl.load(states + at * size + places, mask=inside, other=0.0)
                if CHANNELS:
                    state *= tl.load(passes + at * (size // dim_v) + places // dim_v, mask=inside, other=0.0)
                else:
                    state *= tl.load(passes + at)
                state += own_state


@triton.jit
def _outputs(q_desc, k_desc, v_desc, out_desc, starts, final, dots, with_desc, decay, reset, scale, seq_len, seg_chunks,
             num_segs, batches, heads, share_q, share_k, share_v, share_with, dim_k, dim_v, start_place, start_k, start_v,
             tiles_v, decay_b, decay_s, decay_h, reset_b,
             CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MODE: tl.constexpr, RESET: tl.constexpr,
             REVERSE: tl.constexpr, STARTS: tl.constexpr, FINAL: tl.constexpr, DOTS: tl.constexpr,
             STATE_DTYPE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Pass 3: outputs of one segment for BLOCK_V of the values' columns, chunk by chunk, the state carried along.

    DOTS: also the inner product of every output row with the same row of `with_desc`, one number per row and column tile.
    """
    tile_v = tl.program_id(0) % tiles_v
    place = tl.program_id(0) // tiles_v
    seg = place % num_segs
    batch = place // num_segs // heads
    head = place // num_segs % heads
    chunks = tl.cdiv(seq_len, CHUNK)
    begin = seg * seg_chunks
    count = tl.minimum(seg_chunks, chunks - begin)
    rows = tl.arange(0, BLOCK_K)[:, None]
    columns = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (rows < dim_k) & (columns < dim_v)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if STARTS:
        state = tl.load(
            starts + place.to(tl.int64) * start_place + rows * start_k + columns * start_v, mask=inside, other=0.0
        )
    for step in tl.range(0, count, num_stages=STAGES):
        first = (begin + (count - 1 - step if REVERSE else step)) * CHUNK
        q = q_desc.load([batch, head // share_q, first, 0]).reshape(CHUNK, BLOCK_K)
        k = k_desc.load([batch, head // share_k, first, 0]).reshape(CHUNK, BLOCK_K)
        v = v_desc.load([batch, head // share_v, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
        fallen, total, document, documents = _decays(
            decay, reset, batch, head, first, seq_len, decay_b, decay_s, decay_h, reset_b, CHUNK, MODE, RESET
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        out = tl.dot(q.to(STATE_DTYPE), state.to(STATE_DTYPE), input_precision="ieee")
        scores = _inside(scores, fallen, document, CHUNK, MODE, RESET, REVERSE)
        leaving = v
        if MODE != 0 or RESET:
            enters, leaves, through = _edges(fallen, total, document, documents, RESET, REVERSE)
            out *= enters[:, None]
            state *= through
            leaving = (v * leaves[:, None]).to(v.dtype)
        out = tl.dot(scores.to(v.dtype), v, out, input_precision="ieee") * scale
        state = tl.dot(tl.trans(k), leaving, state, input_precision="ieee")
        out_desc.store([batch, head, first, tile_v * BLOCK_V], out.to(out_desc.dtype).reshape(1, 1, CHUNK, BLOCK_V))
        if DOTS:
            other = with_desc.load([batch, head // share_with, first, tile_v * BLOCK_V]).reshape(CHUNK, BLOCK_V)
            tokens = first + tl.arange(0, CHUNK)
            at = ((tile_v * batches + batch) * heads + head).to(tl.int64) * seq_len + tokens
            tl.store(dots + at, tl.sum(out * other.to(tl.float32), 1), mask=tokens < seq_len)
    if FINAL:
        last = seg == (0 if REVERSE else num_segs - 1)
        into = final + (batch * heads + head).to(tl.int64) * dim_k * dim_v + rows * dim_v + columns
        tl.store(into, state, mask=inside & last)


@triton.jit
def _decay_sums(of_q, of_k, starts, ends, final, d_final, reset, d_decay, scale, seq_len, seg_tokens, num_segs, heads,
                lines, tiles_q, tiles_k, size, reset_b, RESET: tl.constexpr, STARTS: tl.constexpr,
                BLOCK: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Gradients of one segment's log decays: sums of q.dq - k.dk over later tokens, to the segment's end.

    The term of later segments is the inner product of the state there and its gradient.
    """
    place = tl.program_id(0)
    line = (place // num_segs).to(tl.int64)
    seg = place % num_segs
    inner = tl.zeros([WIDE], tl.float32)
    if seg == num_segs - 1:
        for at in range(0, size, WIDE):
            places = at + tl.arange(0, WIDE)
            one = tl.load(final + line * size + places, mask=places < size, other=0.0)
            inner += one * tl.load(d_final + line * size + places, mask=places < size, other=0.0)
    elif STARTS:
        here = (line * num_segs + seg) * size
        for at in range(0, size, WIDE):
            places = at + tl.arange(0, WIDE)
            one = tl.load(starts + here + size + places, mask=places < size, other=0.0)
            inner += one * scale * tl.load(ends + here + places, mask=places < size, other=0.0)
    later = tl.sum(inner, 0)
    begin = seg * seg_tokens
    blocks = tl.cdiv(tl.minimum(seq_len - begin, seg_tokens), BLOCK)
    for block in range(blocks):
        places = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        tokens = begin + places
        inside = (places < seg_tokens) & (tokens < seq_len)
        change = tl.zeros([BLOCK], tl.float32)
        for tile in range(tiles_q):
            change += tl.load(of_q + (tile * lines + line) * seq_len + tokens, mask=inside, other=0.0)
        for tile in range(tiles_k):
            change -= tl.load(of_k + (tile * lines + line) * seq_len + tokens, mask=inside, other=0.0)
        sums = tl.cumsum(change, 0, reverse=True) + later
        later += tl.sum(change, 0)
        if RESET:  # a decay at a reset has no gradient; a document's terms add up to 0
            begins = tl.load(reset + line // heads * reset_b + tokens, mask=inside, other=0)
            sums = tl.where(begins != 0, 0.0, sums)
        tl.store(d_decay + (line // heads * seq_len + tokens) * heads + line % heads, sums, mask=inside)


@dataclass(frozen=True)
class Tiling:
    """Tiling of a scan: tokens per chunk, columns of v per program, segments per head, warps and buffered chunks of pass 3.

    `parts` is the number of pieces of a segment in pass 1.
    """

    chunk: int
    block_v: int
    segments: int
    warps: int
    stages: int
    parts: int = 2

    def segment_tokens(self, seq_len: int) -> int:
        """Tokens per segment, except the last."""
        return self.chunk * triton.cdiv(triton.cdiv(seq_len, self.chunk), self.segments)


def tiling(batch: int, heads: int, seq_len: int, dim_k: int, dim_v: int, num_sms: int) -> Tiling:
    """The tiling of a scan, from its shape and the GPU's multiprocessors; a pure function."""
    chunk = 64 if seq_len > 16 else 16
    block_v = min(_block(dim_v), 64)
    tiles_v = triton.cdiv(dim_v, block_v)
    chunks = triton.cdiv(seq_len, chunk)
    # Two programs per multiprocessor; segments shorter than 8 chunks would spend most of their time on states.
    wanted = max(1, 2 * num_sms // (batch * heads * tiles_v))
    segments = max(1, min(wanted, chunks // 8))
    segments = triton.cdiv(chunks, triton.cdiv(chunks, segments))
    return Tiling(chunk, block_v, segments, 4, 2 if dim_k <= 128 else 1)


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@dataclass(frozen=True)
class Fall:
    """Decays and resets as the kernels take them: decay [H] or [B, S, H], reset bool [B, S] (a document starts), or None."""

    decay: Tensor | None
    reset: Tensor | None

    @property
    def channels(self) -> Tensor | None:
        """The decays if they are per key channel, else None."""
        return self.decay if self.decay is not None and self.decay.dim() == 4 else None

    def arguments(self) -> tuple[Tensor | None, Tensor | None]:
        return self.decay, self.reset

    def strides(self) -> tuple[int, int, int, int]:
        decay = self.decay
        of_decay = (0, 0, 0) if decay is None else (0, 0, decay.stride(0)) if decay.dim() == 1 else decay.stride()[:3]
        return (*of_decay, 0 if self.reset is None else self.reset.stride(0))

    def modes(self) -> dict[str, Any]:
        mode = NO_DECAY if self.decay is None else HEAD_DECAY if self.decay.dim() == 1 else TOKEN_DECAY
        return {"MODE": mode, "RESET": self.reset is not None}


def segment_states(
    k: Tensor, v: Tensor, heads: int, plan: Tiling, initial: Tensor | None, *, fall: Fall, reverse: bool = False
) -> Tensor:
    """Passes 1 and 2: the initial state of every segment [B, H, segments, Dk, Dv]; in reverse time the state at its end.

    k [B, S, H_k, Dk], v [B, S, H_v, Dv] with H_k and H_v dividing `heads`; `initial` [B, H, Dk, Dv] or None.
    """
    states, passes, grid, given, options = parts_of(k, v, heads, plan)
    if len(states):
        _part_states[grid](
            *given[:2], states, passes, *fall.arguments(), *given[2:], *fall.strides(), **fall.modes(), STAGES=3,
            REVERSE=reverse, **options,
        )  # fmt: skip
    return prefix(states, passes, initial, k.shape[0], heads, plan, reverse)


def parts_of(
    k: Tensor, v: Tensor, heads: int, plan: Tiling
) -> tuple[Tensor, Tensor, tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Pass 1's outputs (states [parts, Dk, Dv], factors of earlier states [parts]), its grid, arguments and options."""
    batch, seq_len, _, dim_k = k.shape
    dim_v = v.shape[-1]
    seg_chunks = plan.segment_tokens(seq_len) // plan.chunk
    parts = batch * heads * (plan.segments - 1) * plan.parts
    states = k.new_empty((parts, dim_k, dim_v), dtype=torch.float32)
    block_k, block_v = min(_block(dim_k), 128), min(_block(dim_v), 128)
    tiles_k, tiles_v = triton.cdiv(dim_k, block_k), triton.cdiv(dim_v, block_v)
    given = (
        _rows(k, plan.chunk, block_k), _rows(v, plan.chunk, block_v),
        seq_len, seg_chunks, plan.segments, triton.cdiv(seg_chunks, plan.parts), plan.parts, heads,
        heads // k.shape[2], heads // v.shape[2], dim_k, dim_v, tiles_v,
    )  # fmt: skip
    options = {"CHUNK": plan.chunk, "BLOCK_K": block_k, "BLOCK_V": block_v}
    options["num_warps"] = 8 if block_k * block_v == 128 * 128 else 4
    return states, states.new_empty((parts,)), (parts, tiles_k * tiles_v), given, options


def prefix(
    states: Tensor, passes: Tensor, initial: Tensor | None, batch: int, heads: int, plan: Tiling, reverse: bool
) -> Tensor:
    """Pass 2; `passes` [parts] or, with decays per key channel, [parts, Dk]."""
    _, dim_k, dim_v = states.shape
    starts = states.new_empty((batch, heads, plan.segments, dim_k, dim_v))
    size, block = dim_k * dim_v, 1024
    _prefix[(batch * heads, triton.cdiv(size, block))](
        states, passes, initial, starts, plan.segments, plan.parts, size, dim_v,
        INITIAL=initial is not None, REVERSE=reverse, CHANNELS=passes.dim() == 2, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return starts


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
    reverse: bool = False,
    final: Tensor | None = None,
    dots_with: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Pass 3: outputs [B, S, heads, Dv] in v's dtype, and with `dots_with` each row's inner product with the same row of it,
    per column tile [tiles, B, heads, S].

    `starts` [B, H, segments, Dk, Dv] of any strides; `final` [B, H, Dk, Dv] receives the state after the last segment.
    """
    batch, seq_len, _, dim_k = q.shape
    dim_v = v.shape[-1]
    out = v.new_empty((batch, seq_len, heads, dim_v))
    seg_chunks = plan.segment_tokens(seq_len) // plan.chunk
    block_k, block_v = _block(dim_k), min(_block(dim_v), plan.block_v)
    tiles_v = triton.cdiv(dim_v, block_v)
    dots = None
    if dots_with is not None:
        dots = q.new_empty((tiles_v, batch, heads, seq_len), dtype=torch.float32)  # per column tile; the caller adds
    out_rows = _rows(out, plan.chunk, block_v)
    of_starts = (0, 0, 0) if starts is None else starts.stride()[2:]
    _outputs[(batch * heads * plan.segments * tiles_v,)](
        _rows(q, plan.chunk, block_k), _rows(k, plan.chunk, block_k), _rows(v, plan.chunk, block_v), out_rows,
        starts, final, dots, out_rows if dots_with is None else _rows(dots_with, plan.chunk, block_v),
        *fall.arguments(), scale, seq_len, seg_chunks, plan.segments, batch, heads,
        heads // q.shape[2], heads // k.shape[2], heads // v.shape[2],
        1 if dots_with is None else heads // dots_with.shape[2],
        dim_k, dim_v, *of_starts, tiles_v, *fall.strides(),
        CHUNK=plan.chunk, BLOCK_K=block_k, BLOCK_V=block_v, **fall.modes(), REVERSE=reverse,
        STARTS=starts is not None, FINAL=final is not None, DOTS=dots_with is not None,
        STATE_DTYPE=_state_dtype(q.dtype), STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip
    return out, dots


def decay_gradient(
    of_q: Tensor,
    of_k: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    final: Tensor,
    d_final: Tensor,
    reset: Tensor | None,
    scale: float,
    plan: Tiling,
) -> Tensor:
    """Gradient of log decays [B, S, H] from q.dq and k.dk [tiles, B, H, S], and states and their gradients (arXiv:2312.06635, 4.3).

    Sums end at a segment's end: fewer terms, smaller rounding errors.
    """
    tiles_q, batch, heads, seq_len = of_q.shape
    d_decay = of_q.new_empty((batch, seq_len, heads))
    lines = batch * heads
    _decay_sums[(lines * plan.segments,)](
        of_q, of_k, starts, ends, final, d_final, reset, d_decay, scale, seq_len, plan.segment_tokens(seq_len),
        plan.segments, heads, lines, tiles_q, of_k.shape[0], final.shape[-2] * final.shape[-1],
        0 if reset is None else reset.stride(0), RESET=reset is not None,
        STARTS=starts is not None, BLOCK=1024, WIDE=8192, num_warps=8,
    )  # fmt: skip
    return d_decay


def _state_dtype(dtype: torch.dtype) -> Any:
    """Dtype of a state in products with queries: sums over many tokens may exceed float16's range. The interpreter has no bfloat16."""
    if dtype == torch.float16 and not INTERPRETED:
        return tl.bfloat16
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def _rows(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x [B, S, H, D] as boxes of `rows` tokens and `columns` numbers of one head; reads outside are zero."""
    by_head = x.transpose(1, 2)
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), [1, 1, rows, columns])
