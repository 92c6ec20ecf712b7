"""NF4 and FP4 dequantized in one pass over memory, both levels of scales in the same kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.nf4.reference import NESTED_BLOCK

WORDS_A_PROGRAM = 512
"""Words of 8 codes that a program reads: 2 KB of codes and 8 KB of 16-bit weights, 4 words a thread."""


@triton.jit
def dequantize(
    words, scales, table, out, values, outer, offsets, first, num_words,
    BLOCK_WORDS: tl.constexpr, WORDS: tl.constexpr, NESTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """out[8 w + i] = table[code i of word w] * the scale of its block: WORDS words a program, BLOCK_WORDS words a block.

    words int32 hold 8 codes each: byte j those of weights 2 j (high nibble) and 2 j + 1. scales are float32, or with
    NESTED uint8 indices into `values`, times outer[b], plus offsets[b], with b = (first + block) / SHARED.
    """
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)[:, None]  # its 8 weights are a thread's
    inside = word < num_words
    packed = tl.load(words + word, mask=inside, other=0)
    block = word // BLOCK_WORDS
    if NESTED:
        step = tl.load(values + tl.load(scales + block, mask=inside, other=0).to(tl.int32))
        group = (block + first) // SHARED
        scale = step * tl.load(outer + group, mask=inside, other=0.0)
        scale = scale + tl.load(offsets + group, mask=inside, other=0.0)
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    place = tl.arange(0, 8)[None, :]
    shift = (place // 2) * 8 + (1 - place % 2) * 4
    weights = tl.load(table + ((packed >> shift) & 15)) * scale
    tl.store(out + word * 8 + place, weights.to(out.dtype.element_ty), mask=inside)


def launch_dequantize(
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    out: Tensor,
    values: Tensor | None,
    outer: Tensor | None,
    offsets: Tensor | None,
    first: int,
) -> None:
    """out [N, K] from contiguous codes uint8 [N, K / 2] and scales [N, G]; blocks have a multiple of 8 weights."""
    words = codes.view(-1).view(torch.int32)
    width = out.shape[1] // scales.shape[1]
    if len(words):
        none = table if values is None else values
        dequantize[(triton.cdiv(len(words), WORDS_A_PROGRAM),)](
            words, scales, table, out, none, none if outer is None else outer, none if offsets is None else offsets,
            first, len(words), BLOCK_WORDS=width // 8, WORDS=WORDS_A_PROGRAM, NESTED=values is not None,
            SHARED=NESTED_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
