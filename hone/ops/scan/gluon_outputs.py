"""The output pass of a scan on Hopper: loads of the next chunk overlap the products of this one, and products overlap (Gluon).

The same mathematics as `_outputs` in `hone.ops.scan.triton_kernels`, its portable form and reference. Per chunk of 64
tokens and 64 columns of values, with the state [Dk, 64] in float32 registers and a 16-bit copy in shared memory:

    scores = q k^T and out = q S run together; while the masked scores are multiplied with v, v is weighted for the state;
    while k^T v is added to the state, the outputs are stored.

Two programs share a multiprocessor, so that one computes while the other one waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
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

from hone.ops.compat import tma_load, tma_store, warpgroup_barrier
from hone.ops.descriptors import boxes
from hone.ops.scan.triton_kernels import Fall, Tiling, _decays, _edges

CHUNK = 64
BLOCK_V = 64
LOG2E = tl.constexpr(1.4426950408889634)
FLAT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


class ChunkDecays(NamedTuple):
    """A chunk's decays and resets, computed once for all programs of the output pass.

    `tokens` float32 [B, H, chunks, 4, 64]: log2 decay since the chunk's start, weight of the incoming state in a token's
    output, weight of the token in the outgoing state, number of documents started since the chunk's start. `through`
    float32 [B, H, chunks]: weight of the incoming state in the outgoing one. In order of time.
    """

    tokens: Tensor
    through: Tensor
    resets: bool


@triton.jit
def _chunk_decays(tokens, through, decay, reset, seq_len, chunks, heads, decay_b, decay_s, decay_h, reset_b,
           CHUNK: tl.constexpr, MODE: tl.constexpr, RESET: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    fallen, total, document, documents = _decays(
        decay, reset, row // heads, row % heads, chunk * CHUNK, seq_len, decay_b, decay_s, decay_h, reset_b,
        CHUNK, MODE, RESET)  # fmt: skip
    enters, leaves, kept = _edges(fallen, total, document, documents, RESET, False)
    at = row.to(tl.int64) * chunks + chunk
    into = tokens + at * 4 * CHUNK + tl.arange(0, CHUNK)
    tl.store(into, fallen * LOG2E)
    tl.store(into + CHUNK, enters)
    tl.store(into + 2 * CHUNK, leaves)
    tl.store(into + 3 * CHUNK, document.to(tl.float32))
    tl.store(through + at, kept)


def chunk_decays(fall: Fall, batch: int, heads: int, seq_len: int, device: torch.device) -> ChunkDecays | None:
    """The decays and resets of every chunk; None without decays and resets."""
    if fall.decay is None and fall.reset is None:
        return None
    chunks = triton.cdiv(seq_len, CHUNK)
    tokens = torch.empty((batch, heads, chunks, 4, CHUNK), dtype=torch.float32, device=device)
    through = torch.empty((batch, heads, chunks), dtype=torch.float32, device=device)
    _chunk_decays[(batch * heads, chunks)](
        tokens, through, *fall.arguments(), seq_len, chunks, heads, *fall.strides(),
        CHUNK=CHUNK, **fall.modes(), num_warps=2,
    )  # fmt: skip
    return ChunkDecays(tokens, through, fall.reset is not None)


@gluon.jit
def _fetch(q_desc, k_desc, v_desc, decays_desc, q_shared, k_shared, v_shared, decays_shared, ready, buffer, batch, head_q,
           head_k, head_v, first, column, decays_at, FALLS: gl.constexpr):  # fmt: skip
    """Starts the loads of one chunk into `buffer`."""
    bar = ready.index(buffer)
    SIZE: gl.constexpr = q_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes
    if FALLS:
        mbarrier.expect(bar, SIZE + decays_desc.block_type.nbytes)
    else:
        mbarrier.expect(bar, SIZE)
    tma_load(q_desc, [batch, head_q, first, 0], bar, q_shared.index(buffer))
    tma_load(k_desc, [batch, head_k, first, 0], bar, k_shared.index(buffer))
    tma_load(v_desc, [batch, head_v, first, column], bar, v_shared.index(buffer))
    if FALLS:
        tma_load(decays_desc, [decays_at], bar, decays_shared.index(buffer))


@gluon.jit
def _seen(scores, decays, layout: gl.constexpr, FALLS: gl.constexpr, RESET: gl.constexpr, REVERSE: gl.constexpr):
    """Scores [row, column] decayed and masked."""
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    seen = (column >= row) if REVERSE else (column <= row)
    if RESET:
        ours = decays.slice(192, 64).load(gl.SliceLayout(1, layout))
        theirs = decays.slice(192, 64).load(gl.SliceLayout(0, layout))
        seen = seen & (ours[:, None] == theirs[None, :])
    if FALLS:
        at_row = decays.slice(0, 64).load(gl.SliceLayout(1, layout))[:, None]
        at_column = decays.slice(0, 64).load(gl.SliceLayout(0, layout))[None, :]
        fall = (at_column - at_row) if REVERSE else (at_row - at_column)
        scores = scores * gl.exp2(gl.where(seen, fall, 0.0))  # masked first: masked differences may overflow
    return gl.where(seen, scores, 0.0)


@gluon.jit
def _weigh(v, into, decays, REVERSE: gl.constexpr):
    """Stores v, each token times its weight in the outgoing state, to shared memory."""
    BLOCK_V: gl.constexpr = v.type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BLOCK_V, BLOCK_V // 8], [4, 1], [1, 0])
    weights = decays.slice(64 if REVERSE else 128, 64).load(gl.SliceLayout(1, layout))
    into.store((v.load(layout).to(gl.float32) * weights[:, None]).to(into.dtype))


@gluon.jit
def _dots(out, theirs, into, first, seq_len, layout: gl.constexpr):
    """The inner product of every row of `out` with the same row of `theirs`, stored to `into`."""
    tokens = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    gl.store(into + tokens, gl.sum(out * theirs.to(gl.float32), 1), mask=tokens < seq_len)


@gluon.jit
def _rows_of(at, stride, first, seq_len, columns, dim_v, layout: gl.constexpr):
    """A chunk's rows at `at`, [64, BLOCK_V]."""
    tokens = first + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    return gl.load(at + tokens.to(gl.int64) * stride + columns, mask=(tokens < seq_len) & (columns < dim_v), other=0.0)


@gluon.jit
def _multiply(
    q, k, v, state, state_shared, decays, kept, FALLS: gl.constexpr, RESET: gl.constexpr, REVERSE: gl.constexpr
):
    """One chunk: (out, the state after it), both still in flight. `state_shared` holds the state before it."""
    BLOCK_V: gl.constexpr = v.type.shape[1]
    on_out: gl.constexpr = state.type.layout
    on_scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    nothing = gl.zeros([64, 64], gl.float32, on_scores)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    out = gl.zeros([64, BLOCK_V], gl.float32, on_out)
    out = warpgroup_mma(q, state_shared, out, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    scores = _seen(scores, decays, on_scores, FALLS, RESET, REVERSE)
    scores = gl.convert_layout(scores.to(v.dtype), gl.DotOperandLayout(operand_index=0, parent=on_out, k_width=2))
    out = warpgroup_mma_wait(0, deps=[out])
    if FALLS:
        enters = decays.slice(128 if REVERSE else 64, 64).load(gl.SliceLayout(1, on_out))
        out = out * enters[:, None]
    out = warpgroup_mma(scores, v, out, is_async=True)
    leaving = v
    if FALLS:
        state = state * kept
        warpgroup_barrier()  # every warp has finished q S: its buffer is free
        leaving = state_shared.slice(0, 64, 0)
        _weigh(v, leaving, decays, REVERSE)
        fence_async_shared()
        warpgroup_barrier()
    state = warpgroup_mma(k.permute((1, 0)), leaving, state, is_async=True)
    return out, state


@gluon.jit
def _outputs(q_desc, k_desc, v_desc, out_desc, decays_desc, through, starts, final, dots, other, scale, seq_len,
             seg_chunks, num_segs, batches, heads, share_q, share_k, share_v, share_other, dim_k, dim_v,
             start_place, start_k, start_v, other_b, other_s, other_h, tiles_v,
             FALLS: gl.constexpr, RESET: gl.constexpr, REVERSE: gl.constexpr, STARTS: gl.constexpr,
             FINAL: gl.constexpr, DOTS: gl.constexpr):  # fmt: skip
    """Outputs of one segment for BLOCK_V of the values' columns, chunk by chunk; see `hone.ops.scan.triton_kernels._outputs`."""
    BLOCK_K: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = v_desc.dtype
    on_out: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_V, 16]
    )
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_shared = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, BLOCK_K], q_desc.layout)
    k_shared = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, BLOCK_K], k_desc.layout)
    v_shared = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, BLOCK_V], v_desc.layout)
    state_shared = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_V], tiled)
    out_shared = gl.allocate_shared_memory(dtype, [1, 1, 64, BLOCK_V], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    decays_shared = ready  # unused without decays
    if FALLS:
        decays_shared = gl.allocate_shared_memory(gl.float32, [2, 4 * 64], decays_desc.layout)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()

    tile_v = gl.program_id(0) % tiles_v
    place = gl.program_id(0) // tiles_v
    seg = place % num_segs
    line = place // num_segs
    batch = line // heads
    head = line % heads
    column = tile_v * BLOCK_V
    chunks = gl.cdiv(seq_len, 64)
    begin = seg * seg_chunks
    count = gl.minimum(seg_chunks, chunks - begin)
    chunk = begin + count - 1 if REVERSE else begin
    _fetch(q_desc, k_desc, v_desc, decays_desc, q_shared, k_shared, v_shared, decays_shared, ready, 0, batch,
           head // share_q, head // share_k, head // share_v, chunk * 64, column, (line * chunks + chunk) * 256,
           FALLS)  # fmt: skip
    rows = gl.arange(0, BLOCK_K, gl.SliceLayout(1, on_out))[:, None]
    columns = column + gl.arange(0, BLOCK_V, gl.SliceLayout(0, on_out))[None, :]
    inside = (rows < dim_k) & (columns < dim_v)
    state = gl.zeros([BLOCK_K, BLOCK_V], gl.float32, on_out)
    if STARTS:
        at = starts + place.to(gl.int64) * start_place + rows * start_k + columns * start_v
        state = gl.load(at, mask=inside, other=0.0)
    for step in range(count):
        buffer = step % 2
        chunk = begin + count - 1 - step if REVERSE else begin + step
        first = chunk * 64
        if FALLS:
            warpgroup_barrier()  # the last product may still read the weighted values in the state's buffer
        state_shared.store(state.to(dtype))
        fence_async_shared()
        warpgroup_barrier()
        if step + 1 < count:
            after = chunk - 1 if REVERSE else chunk + 1
            _fetch(q_desc, k_desc, v_desc, decays_desc, q_shared, k_shared, v_shared, decays_shared, ready, 1 - buffer,
                   batch, head // share_q, head // share_k, head // share_v, after * 64, column,
                   (line * chunks + after) * 256, FALLS)  # fmt: skip
        kept = gl.load(through + line * chunks + chunk) if FALLS else 1.0
        if DOTS:
            theirs = _rows_of(other + batch.to(gl.int64) * other_b + head // share_other * other_h, other_s, first,
                              seq_len, columns, dim_v, on_out)  # fmt: skip
        mbarrier.wait(ready.index(buffer), (step // 2) & 1)
        out, state = _multiply(
            q_shared.index(buffer).reshape([64, BLOCK_K]), k_shared.index(buffer).reshape([64, BLOCK_K]),
            v_shared.index(buffer).reshape([64, BLOCK_V]), state, state_shared, decays_shared.index(buffer), kept,
            FALLS, RESET, REVERSE)  # fmt: skip
        out = warpgroup_mma_wait(1, deps=[out]) * scale
        if DOTS:
            into = dots + ((tile_v * batches + batch) * heads + head).to(gl.int64) * seq_len
            _dots(out, theirs, into, first, seq_len, on_out)
        tma.store_wait(0)
        warpgroup_barrier()
        out_shared.reshape([64, BLOCK_V]).store(out.to(dtype))
        fence_async_shared()
        warpgroup_barrier()
        tma_store(out_desc, [batch, head, first, column], out_shared)
        state = warpgroup_mma_wait(0, deps=[state])
    tma.store_wait(0)
    if FINAL:
        last = seg == (0 if REVERSE else num_segs - 1)
        into = final + line.to(gl.int64) * dim_k * dim_v + rows * dim_v + columns
        gl.store(into, state, mask=inside & last)


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    plan: Tiling,
    starts: Tensor | None,
    *,
    known: ChunkDecays | None,
    reverse: bool = False,
    final: Tensor | None = None,
    dots_with: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `hone.ops.scan.triton_kernels.outputs`, with decays as `ChunkDecays`; bfloat16, chunks of 64, Dk up to 128."""
    batch, seq_len, _, dim_k = q.shape
    dim_v = v.shape[-1]
    out = v.new_empty((batch, seq_len, heads, dim_v))
    block_k = 64 if dim_k <= 64 else 128
    tiles_v = triton.cdiv(dim_v, BLOCK_V)
    dots = None
    if dots_with is not None:
        dots = q.new_empty((tiles_v, batch, heads, seq_len), dtype=torch.float32)
    other = (0, 0, 0) if dots_with is None else dots_with.stride()[:3]
    of_starts = (0, 0, 0) if starts is None else starts.stride()[2:]
    decays_desc = None
    if known is not None:
        decays_desc = TensorDescriptor(known.tokens, [known.tokens.numel()], [1], [4 * CHUNK], FLAT)
    _outputs[(batch * heads * plan.segments * tiles_v,)](
        _rows(q, block_k), _rows(k, block_k), _rows(v, BLOCK_V), _rows(out, BLOCK_V), decays_desc,
        None if known is None else known.through, starts, final, dots, dots_with, scale,
        seq_len, plan.segment_tokens(seq_len) // CHUNK, plan.segments, batch, heads,
        heads // q.shape[2], heads // k.shape[2], heads // v.shape[2],
        1 if dots_with is None else heads // dots_with.shape[2],
        dim_k, dim_v, *of_starts, *other, tiles_v,
        FALLS=known is not None, RESET=known is not None and known.resets, REVERSE=reverse,
        STARTS=starts is not None, FINAL=final is not None, DOTS=dots_with is not None, num_warps=4,
    )  # fmt: skip
    return out, dots


def _rows(x: Tensor, columns: int) -> TensorDescriptor:
    """x [B, S, H, D] as boxes of a chunk's tokens and `columns` numbers of one head."""
    return boxes(x.transpose(1, 2), 1, 1, CHUNK, columns)
