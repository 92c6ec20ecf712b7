"""Sets logits to -inf where a token's bit is not set: one pass that reads the bits and writes the dropped logits only."""

import triton
import triton.language as tl


@triton.jit
def mask_rows(
    logits,  # [E, V], last axis contiguous
    bitmask,  # int32 [M, W], contiguous
    rows,  # int64 [E]: the entry's mask, -1: none
    stride,
    num_values,
    num_words,
    BLOCK: tl.constexpr,
):
    """Logits are never read: a program writes -inf under the clear bits of one block of a row."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if row < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + row * num_words + at // 32, mask=at < num_values, other=-1)
    dropped = ((word >> (at % 32)) & 1) == 0
    tl.store(logits + place * stride + at, float("-inf"), mask=dropped & (at < num_values))
