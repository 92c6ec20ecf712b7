"""Work within single chunks: the weights of pairs, queries and keys, and the gradients' terms of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.scan.triton_kernels import Fall, Tiling, _block, _rows

FEW = 32
"""Channels per step of a chunk's programs: with 8 warps their weights leave room for two programs per multiprocessor."""


@triton.jit
def documents_of(reset, batch, first, seq_len, reset_b, CHUNK: tl.constexpr, RESET: tl.constexpr):
    """Number of documents that begin from the chunk's start up to each token, and in the whole chunk."""
    rows = first + tl.arange(0, CHUNK)
    if RESET:
        begins = tl.load(reset + batch * reset_b + rows, mask=rows < seq_len, other=0).to(tl.int32)
        return tl.cumsum(begins, 0), tl.sum(begins, 0)
    return tl.zeros([CHUNK], tl.int32), 0


@triton.jit
def _fall(g_desc, fallen_desc, through, reset, seq_len, chunks, heads, dim_k, reset_b,
          CHUNK: tl.constexpr, FEW: tl.constexpr, RESET: tl.constexpr):  # fmt: skip
    """Computes `Weighed.fallen` and `Weighed.through` for FEW channels of one chunk of one head."""
    place = tl.program_id(0)
    batch = place // chunks // heads
    head = place // chunks % heads
    first = place % chunks * CHUNK
    channel = tl.program_id(1) * FEW
    steps = g_desc.load([batch, head, first, channel]).reshape(CHUNK, FEW).to(tl.float32) * 1.4426950408889634
    fallen_desc.store([batch, head, first, channel], tl.cumsum(steps, 0).reshape(1, 1, CHUNK, FEW))
    passes = tl.exp2(tl.sum(steps, 0))
    if RESET:
        _, documents = documents_of(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        passes = tl.where(documents == 0, passes, 0.0)
    channels = channel + tl.arange(0, FEW)
    tl.store(through + place * dim_k + channels, passes, mask=channels < dim_k)


@triton.jit
def line_of(fallen, batch, head, seq_len, heads, dim_k):
    """Pointer to a head's `Weighed.fallen`."""
    return fallen + (batch.to(tl.int64) * seq_len * heads + head) * dim_k


@triton.jit
def _fallen_at(line, rows, channels, seq_len, heads, dim_k):
    """Cumulative log decays c of tokens `rows` [:, 1] (at most the last token) and `channels` [1, :]."""
    at = tl.minimum(rows, seq_len - 1) * heads * dim_k + channels
    return tl.load(line + at, mask=channels < dim_k, other=0.0)


@triton.jit
def _from_middle(here, line, first, channels, seq_len, heads, dim_k, level, CHUNK: tl.constexpr):
    """exp(-|c - c_mid|) with c_mid at the middle of each token's block of 2 * 2^level tokens; `here` is c."""
    middle = first + ((tl.arange(0, CHUNK) >> level | 1) << level)[:, None] - 1
    return tl.exp2(-tl.abs(here - _fallen_at(line, middle, channels, seq_len, heads, dim_k)))


@triton.jit
def edges(here, line, first, channels, document, documents, seq_len, heads, dim_k, CHUNK: tl.constexpr,
             RESET: tl.constexpr, END: tl.constexpr):  # fmt: skip
    """Weights of the chunk's incoming state in each token or (END) of each token in the outgoing one; `here` is c."""
    weight = here
    if END:
        weight = _fallen_at(line, first + CHUNK - 1, channels, seq_len, heads, dim_k) - here
    weight = tl.exp2(weight)
    if RESET:
        weight = tl.where((document == (documents if END else 0))[:, None], weight, 0.0)
    return weight


@triton.jit
def _levels(CHUNK: tl.constexpr):
    """[row, column]: HALF <= value < 2 HALF where row and column are in the second and first half of a block of 2 HALF; -1
    above the diagonal, 0 on it."""
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    return tl.where(column <= row, row ^ column, -1)


@triton.jit
def _weigh(q_desc, k_desc, fallen_desc, queries_desc, keys_desc, pairs_desc, fallen, reset, seq_len, chunks, heads,
           share_q, share_k, dim_k, reset_b,
           CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, FEW: tl.constexpr, LEVELS: tl.constexpr,
           RESET: tl.constexpr):  # fmt: skip
    """Computes the rest of `Weighed` for one chunk of one head, FEW channels at a time."""
    place = tl.program_id(0)
    batch = place // chunks // heads
    head = place // chunks % heads
    first = place % chunks * CHUNK
    document, documents = documents_of(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
    line = line_of(fallen, batch, head, seq_len, heads, dim_k)
    levels = _levels(CHUNK)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for channel in range(0, BLOCK_K, FEW):
        channels = (channel + tl.arange(0, FEW))[None, :]
        q = q_desc.load([batch, head // share_q, first, channel]).reshape(CHUNK, FEW)
        k = k_desc.load([batch, head // share_k, first, channel]).reshape(CHUNK, FEW)
        here = fallen_desc.load([batch, head, first, channel]).reshape(CHUNK, FEW)
        weight = edges(here, line, first, channels, document, documents, seq_len, heads, dim_k, CHUNK, RESET, False)
        queries_desc.store([batch, head, first, channel], (q * weight).to(q.dtype).reshape(1, 1, CHUNK, FEW))
        weight = edges(here, line, first, channels, document, documents, seq_len, heads, dim_k, CHUNK, RESET, True)
        keys_desc.store([batch, head, first, channel], (k * weight).to(q.dtype).reshape(1, 1, CHUNK, FEW))
        same = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None]
        here_pairs = tl.where(levels == 0, same, 0.0)
        for level in range(LEVELS):
            near = _from_middle(here, line, first, channels, seq_len, heads, dim_k, level, CHUNK)
            product = tl.dot((q * near).to(q.dtype), tl.trans((k * near).to(q.dtype)), input_precision="ieee")
            here_pairs = tl.where(levels >= (1 << level), product, here_pairs)
        pairs += here_pairs
    if RESET:
        pairs = tl.where(document[:, None] == document[None, :], pairs, 0.0)
    pairs_desc.store([batch, head, first, 0], pairs.to(pairs_desc.dtype).reshape(1, 1, CHUNK, CHUNK))


@triton.jit
def _within(q_desc, k_desc, v_desc, fallen_desc, d_out_desc, dq_desc, dk_desc, change_desc, fallen, reset, scale, seq_len,
            chunks, heads, share_q, share_k, share_v, dim_k, reset_b,
            CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr,
            LEVELS: tl.constexpr, RESET: tl.constexpr, CHANGES: tl.constexpr):  # fmt: skip
    """The terms of one chunk's pairs in dq and dk of one head, float32. CHANGES: also those in q * dq - k * dk.

    The latter are computed from the same rounded factors, so that a pair's two terms cancel in sums over both tokens.
    """
    place = tl.program_id(0)
    batch = place // chunks // heads
    head = place // chunks % heads
    first = place % chunks * CHUNK
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for at in range(0, BLOCK_V, WIDE):
        d_out = d_out_desc.load([batch, head, first, at]).reshape(CHUNK, WIDE)
        v = v_desc.load([batch, head // share_v, first, at]).reshape(CHUNK, WIDE)
        pairs = tl.dot(d_out, tl.trans(v), pairs, input_precision="ieee")
    if RESET:
        document, _ = documents_of(reset, batch, first, seq_len, reset_b, CHUNK, RESET)
        pairs = tl.where(document[:, None] == document[None, :], pairs, 0.0)
    line = line_of(fallen, batch, head, seq_len, heads, dim_k)
    levels = _levels(CHUNK)
    same = tl.sum(tl.where(levels == 0, pairs, 0.0), 1)[:, None]
    for channel in range(0, BLOCK_K, FEW):
        channels = (channel + tl.arange(0, FEW))[None, :]
        q = q_desc.load([batch, head // share_q, first, channel]).reshape(CHUNK, FEW)
        k = k_desc.load([batch, head // share_k, first, channel]).reshape(CHUNK, FEW)
        here = fallen_desc.load([batch, head, first, channel]).reshape(CHUNK, FEW)
        dq = same * k.to(tl.float32)
        dk = same * q.to(tl.float32)
        change = tl.zeros([CHUNK, FEW], tl.float32)
        for level in range(LEVELS):
            near = _from_middle(here, line, first, channels, seq_len, heads, dim_k, level, CHUNK)
            across = (levels >= (1 << level)) & (levels < (2 << level))
            part = tl.where(across, pairs, 0.0).to(q.dtype)
            near_q = (q * near).to(q.dtype)
            near_k = (k * near).to(q.dtype)
            of_q = tl.dot(part, near_k, input_precision="ieee")
            of_k = tl.dot(tl.trans(part), near_q, input_precision="ieee")
            dq += near * of_q
            dk += near * of_k
            if CHANGES:
                change += near_q.to(tl.float32) * of_q - near_k.to(tl.float32) * of_k
        dq_desc.store([batch, head, first, channel], (dq * scale).reshape(1, 1, CHUNK, FEW))
        dk_desc.store([batch, head, first, channel], (dk * scale).reshape(1, 1, CHUNK, FEW))
        if CHANGES:
            change_desc.store([batch, head, first, channel], (change * scale).reshape(1, 1, CHUNK, FEW))


@dataclass(frozen=True)
class Weighed:
    """The parts of a scan that need no state; c is the sum of log decays within a chunk; zero across documents.

    fallen c, in powers of two [B, S, H, Dk] float32; queries q_s exp(c_s) and keys k_t exp(c_end - c_t) [B, S, H, Dk];
    pairs (sum_d q_s k_t exp(c_s - c_t), t <= s) [B, S, H, chunk]; through exp(c_end) [B, H, chunks, Dk] float32.
    """

    fallen: Tensor
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
        q.new_empty((batch, seq_len, heads, dim_k), dtype=torch.float32),
        q.new_empty((batch, seq_len, heads, dim_k)),
        k.new_empty((batch, seq_len, heads, dim_k)),
        q.new_empty((batch, seq_len, heads, chunk)),
        q.new_empty((batch, heads, chunks, dim_k), dtype=torch.float32),
    )
    reset_b = 0 if fall.reset is None else fall.reset.stride(0)
    fallen = _rows(made.fallen, chunk, few)
    _fall[(batch * heads * chunks, triton.cdiv(dim_k, few))](
        _rows(fall.decay, chunk, few), fallen, made.through, fall.reset, seq_len, chunks, heads, dim_k, reset_b,
        CHUNK=chunk, FEW=few, RESET=fall.reset is not None, num_warps=4,
    )  # fmt: skip
    _weigh[(batch * heads * chunks,)](
        _rows(q, chunk, few), _rows(k, chunk, few), fallen, _rows(made.queries, chunk, few),
        _rows(made.keys, chunk, few), _rows(made.pairs, chunk, chunk), made.fallen, fall.reset, seq_len, chunks, heads,
        heads // q.shape[2], heads // k.shape[2], dim_k, reset_b,
        CHUNK=chunk, BLOCK_K=block_k, FEW=few, LEVELS=chunk.bit_length() - 1, RESET=fall.reset is not None,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return made


def of_pairs(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, scale: float, plan: Tiling, fallen: Tensor, reset: Tensor | None,
    decays: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The terms of pairs within chunks in dq, dk and (if `decays`) q * dq - k * dk, [B, S, H, Dk] float32."""
    seq_len, chunk, chunks = q.shape[1], plan.chunk, triton.cdiv(q.shape[1], plan.chunk)
    heads, block_k, block_v = d_out.shape[2], _block(q.shape[-1]), _block(v.shape[-1])
    few, wide = min(block_k, FEW), min(block_v, 64)
    dq, dk = torch.empty_like(fallen), torch.empty_like(fallen)
    change = torch.empty_like(fallen) if decays else dq
    _within[(len(q) * heads * chunks,)](
        _rows(q, chunk, few), _rows(k, chunk, few), _rows(v, chunk, wide), _rows(fallen, chunk, few),
        _rows(d_out, chunk, wide), _rows(dq, chunk, few), _rows(dk, chunk, few), _rows(change, chunk, few), fallen, reset,
        scale, seq_len, chunks, heads, heads // q.shape[2], heads // k.shape[2], heads // v.shape[2], q.shape[-1],
        0 if reset is None else reset.stride(0),
        CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=block_v, FEW=few, WIDE=wide, LEVELS=chunk.bit_length() - 1,
        RESET=reset is not None, CHANGES=decays, num_warps=8, num_stages=1,
    )  # fmt: skip
    return dq, dk, change
