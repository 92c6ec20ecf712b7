"""Kernels beside the draw: penalties from a table of counts, updates of the table, log-probabilities of the best tokens.

Legend: E entries, V vocabulary, C blocks of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def penalties(
    logits, counts, rows, presence, frequency, repetition, out, stride, num_values, BLOCK: tl.constexpr
):  # fmt: skip
    """out float32 [E, V]: one block of an entry's penalized logits; see `hone.ops.penalize`."""
    place = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    values = tl.load(logits + place * stride + at, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows + place)
    if row >= 0:
        known = tl.load(counts + row * num_values + at, mask=inside, other=0)
        by = tl.load(repetition + place) + tl.zeros([BLOCK], tl.float32)
        values = tl.where(known != 0, tl.where(values > 0, tl.div_rn(values, by), values * by), values)
        times = known & 0x7FFFFFFF
        less = tl.load(frequency + place) * times.to(tl.float32) + tl.load(presence + place)
        values = tl.where(times > 0, values - less, values)
    tl.store(out + place * num_values + at, values, mask=inside)


@triton.jit
def counted(counts, rows, tokens, num_values, num_tokens, PROMPT: tl.constexpr, BLOCK: tl.constexpr):
    """Counts each token in its row, or marks it as one of the prompt."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < num_tokens, other=-1)
    token = tl.load(tokens + at, mask=at < num_tokens, other=-1)
    real = (row >= 0) & (token >= 0) & (token < num_values)
    where = counts + row * num_values + token
    if PROMPT:
        tl.atomic_or(where, tl.full([BLOCK], -2147483648, tl.int32), mask=real, sem="relaxed")
    else:
        tl.atomic_add(where, tl.full([BLOCK], 1, tl.int32), mask=real, sem="relaxed")


@triton.jit
def best_in_blocks(
    logits, peaks, masses, values_out, tokens_out, stride, num_values, TOP: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest logit of one block, the sum of exp(logit - it), and the block's TOP largest logits with their tokens."""
    place = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    to = place * tl.num_programs(0) + part
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + place * stride + at, mask=at < num_values, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + to, peak)
    tl.store(masses + to, tl.sum(tl.exp2((values - base) * LOG2_E), 0))
    taken = tl.full([BLOCK], False, tl.int1)
    for turn in range(TOP):
        highest, token = _highest(values, at, taken, num_values)
        taken = taken | (at == token)
        tl.store(values_out + to * TOP + turn, highest)
        tl.store(tokens_out + to * TOP + turn, token)


@triton.jit
def best_of_blocks(
    logits, tokens, peaks, masses, values_in, tokens_in, own, values_out, tokens_out, stride, num_values, num_blocks,
    TOP: tl.constexpr, BLOCKS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Log-probabilities of one entry: of its token, and of its TOP best tokens."""
    place = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCKS)
    tops = tl.load(peaks + place * num_blocks + parts, mask=parts < num_blocks, other=float("-inf"))
    sums = tl.load(masses + place * num_blocks + parts, mask=parts < num_blocks, other=0.0)
    peak = tl.max(tops, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    normalizer = base + tl.log(tl.sum(sums * tl.exp2((tops - base) * LOG2_E), 0))
    token = tl.load(tokens + place)
    tl.store(own + place, tl.load(logits + place * stride + token).to(tl.float32) - normalizer)
    if TOP > 0:
        at = tl.arange(0, MANY)
        inside = at < num_blocks * TOP
        values = tl.load(values_in + place * num_blocks * TOP + at, mask=inside, other=float("-inf"))
        ids = tl.load(tokens_in + place * num_blocks * TOP + at, mask=inside, other=2147483647)
        taken = ids == 2147483647
        for turn in range(TOP):
            highest, best = _highest(values, ids, taken, num_values)
            taken = taken | (ids == best)
            tl.store(values_out + place * TOP + turn, highest - normalizer)
            tl.store(tokens_out + place * TOP + turn, best.to(tl.int64))


@triton.jit
def _highest(values, ids, taken, num_values):
    """(the largest value that is not taken, the least of its ids); 2^31 - 1 where nothing is left."""
    free = (taken == 0) & (ids < num_values)
    highest = tl.max(tl.where(free, values, float("-inf")), 0)
    return highest, tl.min(tl.where(free & (values == highest), ids, 2147483647), 0)


def launch_penalize(
    logits: Tensor, counts: Tensor, rows: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """`hone.ops.penalize`."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    entries, width = logits.shape
    out = torch.empty(entries, width, dtype=torch.float32, device=logits.device)
    if out.numel():
        block = min(2048, triton.next_power_of_2(width))
        options = (one.contiguous() for one in (rows, presence, frequency, repetition))
        penalties[(triton.cdiv(width, block), entries)](
            logits, counts, *options, out, logits.stride(0), width, BLOCK=block, num_warps=4
        )
    return out


def launch_count(counts: Tensor, rows: Tensor, tokens: Tensor, prompt: bool) -> None:
    """`hone.ops.count_tokens`."""
    if len(tokens):
        counted[(triton.cdiv(len(tokens), 256),)](
            counts, rows.contiguous(), tokens.contiguous(), counts.shape[1], len(tokens), PROMPT=prompt, BLOCK=256, num_warps=4
        )  # fmt: skip


def launch_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`hone.ops.token_logprobs`."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    entries, width = logits.shape
    block = min(4096, max(16, triton.next_power_of_2(width)))
    blocks = triton.cdiv(width, block)
    new = logits.new_empty
    own = new(entries, dtype=torch.float32)
    values, ids = new(entries, top, dtype=torch.float32), new(entries, top, dtype=torch.int64)
    if not entries:
        return own, values, ids
    some = min(top, block)
    peaks, masses = new(2, entries, blocks, dtype=torch.float32)
    parts, part_ids = new(entries, blocks, some, dtype=torch.float32), new(entries, blocks, some, dtype=torch.int32)
    best_in_blocks[(blocks, entries)](
        logits, peaks, masses, parts, part_ids, logits.stride(0), width, TOP=some, BLOCK=block, num_warps=8
    )
    best_of_blocks[(entries,)](
        logits, tokens.contiguous(), peaks, masses, parts, part_ids, own, values, ids, logits.stride(0), width, blocks,
        TOP=top, BLOCKS=triton.next_power_of_2(blocks), MANY=triton.next_power_of_2(max(1, blocks * some)), num_warps=4,
    )  # fmt: skip
    return own, values, ids
