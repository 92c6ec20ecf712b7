"""Integer weight formats: dense bit packing into 32-bit words, and codes times scales back to weights.

The packing is that of compressed-tensors' `pack-quantized`: along each row, values of `bits` bits follow each other
without gaps, least significant bit first, across word borders; a signed code is stored as code + 2^(bits-1).

Shapes: N rows (output features), K columns (input features), G groups of K/G columns that share one scale,
W = ceil(K * bits / 32) words.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor

WORD = 32


def num_words(num_values: int, bits: int) -> int:
    """Words of 32 bits that `num_values` codes of `bits` bits take."""
    return -(-num_values * bits // WORD)


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest signed code: (-8, 7) for 4 bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs signed codes (int8 [..., K], each within `code_range(bits)`) into int32 [..., W]; 2 <= bits <= 8.

    Source: compressed-tensors 0.20, format `pack-quantized`.
    """
    _check(bits)
    assert codes.dtype == torch.int8, f"codes must be int8, got {codes.dtype}"
    *lead, columns = codes.shape
    words = num_words(columns, bits)
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -columns % WORD))  # 32 values fill exactly `bits` words
    runs = unsigned.reshape(*lead, -1, WORD)
    packed = torch.zeros(*runs.shape[:-1], bits, dtype=torch.int32, device=codes.device)
    for position in range(WORD):
        word, offset = divmod(position * bits, WORD)
        packed[..., word] |= runs[..., position] << offset
        if offset + bits > WORD:
            packed[..., word + 1] |= runs[..., position] >> (WORD - offset)
    return packed.reshape(*lead, -1)[..., :words].contiguous()


def unpack(packed: Tensor, bits: int, num_values: int) -> Tensor:
    """The signed codes (int8 [..., num_values]) in int32 words [..., W]; the inverse of `pack`."""
    _check(bits)
    assert packed.dtype == torch.int32, f"packed words must be int32, got {packed.dtype}"
    assert packed.shape[-1] == num_words(num_values, bits), (
        f"{packed.shape[-1]} words cannot hold {num_values} values of {bits} bits"
    )
    half = 1 << (bits - 1)
    if bits in (4, 8) and sys.byteorder == "little":
        octets = packed.contiguous().view(torch.uint8)
        if bits == 4:  # a byte holds two whole codes, the low nibble first
            octets = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
        return (octets[..., :num_values].to(torch.int16) - half).to(torch.int8)
    *lead, words = packed.shape
    runs = torch.nn.functional.pad(packed, (0, -words % bits)).reshape(-1, bits)
    counts, shift, next_shift, low_mask = _places(bits, packed.device)
    # Each word once for every value that begins in it: views and one copy, where indexing would gather one by one.
    here = [runs[:, word : word + 1].expand(-1, count) for word, count in enumerate(counts)]
    after = [runs[:, min(word + 1, bits - 1)].unsqueeze(1).expand(-1, count) for word, count in enumerate(counts)]
    codes = (torch.cat(here, 1) >> shift).bitwise_and_(low_mask)  # the mask takes the sign bits that the shift brings
    codes |= torch.cat(after, 1) << next_shift
    codes &= (1 << bits) - 1
    return codes.sub_(half).to(torch.int8).view(*lead, -1)[..., :num_values].contiguous()


@cache
def _places(bits: int, device: torch.device) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """Where each of 32 values lies in its run of `bits` words.

    (values that begin in each word; int32 [32] each: shift in that word, shift in the next, mask of what the first
    gives). A value that ends where it begins reads the next word too: those bits land above it and are masked off.
    """
    starts = [position * bits for position in range(WORD)]
    counts = tuple(sum(start // WORD == word for start in starts) for word in range(bits))
    lows = [WORD - start % WORD for start in starts]
    rows = [(WORD - low, min(low, WORD - 1), (1 << low) - 1 if low < WORD else -1) for low in lows]
    shift, next_shift, mask = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
    return counts, shift, next_shift, mask


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [N, K] in `dtype` from codes int8 [N, K] and scales [N, G], K divisible by G: code times scale.

    The product is taken in `dtype`, as compressed-tensors does with scales of the model's dtype.
    """
    rows, columns = codes.shape
    groups = scales.shape[1]
    weights = codes.to(dtype).view(rows, groups, columns // groups)
    return (weights * scales.to(dtype).unsqueeze(-1)).view(rows, columns)


def quantize(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Codes int8 [N, K] nearest to weights [N, K] on the grid of scales [N, G] (non-zero, either sign)."""
    low, high = code_range(bits)
    rows, columns = weights.shape
    groups = scales.shape[1]
    steps = weights.view(rows, groups, columns // groups) / scales.to(weights.dtype).unsqueeze(-1)
    return steps.round_().clamp_(low, high).to(torch.int8).view(rows, columns)


def _check(bits: int) -> None:
    assert 2 <= bits <= 8, f"codes have 2 to 8 bits, not {bits}"
