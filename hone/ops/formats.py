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

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The 8-bit dtypes of activations and of cached keys and values, and the largest value of each."""


def num_words(num_values: int, bits: int) -> int:
    """Number of 32-bit words for `num_values` codes of `bits` bits."""
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
    if bits in (4, 8) and sys.byteorder == "little":  # a byte holds two whole codes, the low nibble first
        octets = torch.nn.functional.pad(codes, (0, -columns % WORD), value=-(1 << (bits - 1))).view(torch.uint8)
        octets = octets ^ 128 if bits == 8 else (octets[..., 0::2] + 8 & 15) | (octets[..., 1::2] + 8 << 4)
        # Flat: a row of one dimension may have a stride that no wider dtype can view.
        return octets.flatten().view(torch.int32).view(*lead, -1)[..., :words].contiguous()
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
    # Each word once for every value that begins in it, by views and one copy: faster than a gather.
    here = [runs[:, word : word + 1].expand(-1, count) for word, count in enumerate(counts)]
    after = [runs[:, min(word + 1, bits - 1)].unsqueeze(1).expand(-1, count) for word, count in enumerate(counts)]
    codes = (torch.cat(here, 1) >> shift).bitwise_and_(low_mask)  # the mask clears the shifted sign bits
    codes |= torch.cat(after, 1) << next_shift
    codes &= (1 << bits) - 1
    return codes.sub_(half).to(torch.int8).view(*lead, 32 * -(-words // bits))[..., :num_values].contiguous()


@cache
def _places(bits: int, device: torch.device) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """The position of each of 32 values in its run of `bits` words.

    (values that begin in each word; int32 [32] each: shift in that word, shift in the next, mask of the first word's bits).
    A value within one word reads the next word too: those bits are shifted above it and masked off.
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


TILE_ROWS = 128
"""Rows that the tiled layout is padded to."""


def tile_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes int8 [N, K] of 4 or 8 bits (K a multiple of 64) in tensor-core order: int32 [N'/64, K * bits/256, 128, 4].

    N' is N rounded up to a multiple of 128 (padded with rows of the smallest code). Tiles of 64 rows by 64 columns (8 bits:
    32) are contiguous; the four words of thread t of a warpgroup are adjacent. 4 bits: one word per 16 columns; 8 bits: two
    words, columns 0 to 7 and 8 to 15. They hold the thread's part of wgmma's A fragment (PTX ISA, m64k16): rows r and
    r + 8, columns 2c, 2c + 1, 2c + 8, 2c + 9, as code + 2^(bits-1). The nibbles of odd columns are in the word's upper
    half, so that word >> 4 i has the two codes of one register in place; bytes are in order.
    """
    low, _ = code_range(bits)
    rows, columns = codes.shape
    assert bits in (4, 8) and columns % 64 == 0, (
        f"{bits} bits, {columns} columns: tiles hold 4 or 8 bits and 64 columns"
    )
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -rows % TILE_ROWS), value=low)
    steps = 64 // (4 * bits)  # 16-column steps in a thread's 16 bytes
    q = (padded ^ low if bits == 8 else padded - low).view(-1, 4, 2, 8, columns // (16 * steps), steps, 2, 4, 2)
    if bits == 4:  # tile warp row+8 row | chunk step column+8 pair parity -> ... parity column+8 row+8
        q = q.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(-1, 4, 2)
        q = q[..., 0] | (q[..., 1] << 4)
    else:  # ... column+8 row+8 parity
        q = q.permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    return q.contiguous().view(-1).view(torch.int32).view(len(padded) // 64, columns // (16 * steps), 128, 4)


def untile_codes(tiled: Tensor, num_rows: int, bits: int) -> Tensor:
    """The codes int8 [num_rows, K] of `tile_codes`."""
    low, _ = code_range(bits)
    tiles, chunks = tiled.shape[:2]
    octets = tiled.contiguous().view(-1).view(torch.int8)
    steps = 64 // (4 * bits)
    if bits == 4:
        octets = octets.view(torch.uint8)
        q = (
            torch.stack((octets & 15, octets >> 4), dim=-1)
            .view(torch.int8)
            .view(tiles, chunks, 4, 8, 4, steps, 2, 2, 2)
        )
        q = q.permute(0, 2, 8, 3, 1, 5, 7, 4, 6) + low
    else:
        q = octets.view(tiles, chunks, 4, 8, 4, steps, 2, 2, 2).permute(0, 2, 7, 3, 1, 5, 6, 4, 8) ^ low
    return q.reshape(tiles * 64, chunks * 16 * steps)[:num_rows].contiguous()


def tiled_rows(tiled: Tensor, index: Tensor, bits: int) -> Tensor:
    """The codes int8 [T, K] of rows `index` int64 [T] of `tile_codes`; no other row is read."""
    low, _ = code_range(bits)
    tiles, chunks = tiled.shape[:2]
    steps = 64 // (4 * bits)
    tile, warp, row, below = index // 64, index // 16 % 4, index % 8, index // 8 % 2
    octets = tiled.contiguous().view(-1).view(torch.int8)
    if bits == 4:  # a byte holds the codes of rows r and r + 8
        octets = octets.view(torch.uint8).view(tiles, chunks, 4, 8, 4, steps, 2, 2)[tile, :, warp, row]
        shift = (4 * below).to(torch.uint8).view(-1, *(1 for _ in octets.shape[1:]))
        q = ((octets >> shift) & 15).view(torch.int8).permute(0, 1, 3, 5, 2, 4) + low
    else:
        octets = octets.view(tiles, chunks, 4, 8, 4, steps, 2, 2, 2)[tile, :, warp, row, :, :, :, below]
        q = octets.permute(0, 1, 3, 4, 2, 5) ^ low
    return q.reshape(len(index), chunks * 16 * steps)


def tile_scales(scales: Tensor) -> Tensor:
    """Scales [N, G] as [G, N'/16, 8, 2]: those of rows r and r + 8 of every 16 are adjacent; N' as in `tile_codes`."""
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -scales.shape[0] % TILE_ROWS))
    return padded.T.reshape(scales.shape[1], -1, 2, 8).transpose(2, 3).contiguous()


def tiled_scales(tiled: Tensor, index: Tensor) -> Tensor:
    """The scales [T, G] of rows `index` int64 [T] of `tile_scales`."""
    return tiled[:, index // 16, index % 8, index // 8 % 2].T


def untile_scales(tiled: Tensor, num_rows: int) -> Tensor:
    """The scales [num_rows, G] of `tile_scales`."""
    return tiled.transpose(2, 3).reshape(len(tiled), -1)[:, :num_rows].T.contiguous()
