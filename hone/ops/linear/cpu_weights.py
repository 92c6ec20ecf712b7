"""Weights of linears as the CPU's product kernels read them: their format, where their rows begin, and blocks of 4-bit codes.

Shapes: N output features, K input features, G groups of columns that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Columns of a block of 4-bit codes: 64 bytes."""
ROWS = 4
"""Rows whose blocks of 4-bit codes alternate: read together they are one sequence in memory."""

STORED = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class CpuWeight:
    """One weight [N, K]: `stored` is its format (`cpu_tiles.dense_tile`, `cpu_codes.codes_tile`), `data` its values or codes.

    `scales` float32 [N, G], each for `group_size` columns, a power of two; `row_scales` float32 [N] are multiplied with the outputs; `bias`
    float32 [N].
    """

    stored: str
    data: Tensor
    out_features: int
    in_features: int
    scales: Tensor | None = None
    group_size: int = 0
    row_scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def columns(self) -> int:
        """Columns with padding: x must have as many."""
        return -(-self.in_features // BLOCK) * BLOCK if self.stored not in STORED.values() else self.in_features

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next, on average where rows alternate."""
        stride = self.data.stride(0) * self.data.element_size()
        return stride // ROWS if self.stored in ("i4", "i4s") else stride


def dense_weight(weight: Tensor, bias: Tensor | None) -> CpuWeight:
    """A weight [N, K] of 16 or 32 bits, read in place."""
    return CpuWeight(STORED[weight.dtype], weight, *weight.shape, bias=_wide(bias))


def byte_weight(codes: Tensor, scales: Tensor, bias: Tensor | None) -> CpuWeight:
    """Codes int8 [N, K], read in place unless they must be padded to 128 columns, with scales [N, G]."""
    shape = codes.shape
    codes = F.pad(codes, (0, -shape[1] % BLOCK)) if shape[1] % BLOCK else codes
    if scales.shape[1] == 1:
        return CpuWeight("i8", codes, *shape, row_scales=_wide(scales), bias=_wide(bias))
    wide, group_size = _grouped(scales, shape[1], codes.shape[1])
    return CpuWeight("i8" if group_size == BLOCK else "i8g", codes, *shape, wide, group_size, bias=_wide(bias))


def block_weight(blocks: Tensor, scales: Tensor, in_features: int, bias: Tensor | None) -> CpuWeight:
    """4-bit codes of `pack_blocks` with scales [N, G]. Columns and rows that pad a block have a scale, too."""
    rows, groups = scales.shape
    if groups == 1:
        return CpuWeight("i4", blocks, rows, in_features, row_scales=_wide(scales), bias=_wide(bias))
    wide, group_size = _grouped(scales, in_features, blocks.shape[1] * BLOCK)
    wide = F.pad(wide, (0, 0, 0, -rows % ROWS)) if rows % ROWS else wide
    return CpuWeight(
        "i4" if group_size == BLOCK else "i4s", blocks, rows, in_features, wide, group_size, bias=_wide(bias)
    )


def quantized_bytes(columns: int) -> int:
    """Bytes of a row of x as products of codes read it (`cpu_codes`): codes of 16 bits, first sums, a scale."""
    return 2 * columns + columns // 2 + 64


def _grouped(scales: Tensor, in_features: int, columns: int) -> tuple[Tensor, int]:
    """Scales float32 for groups of a power of two, 128 at most, and that size: a shift finds a column's. Padded to `columns`."""
    given = in_features // scales.shape[1]
    group_size = min(BLOCK, given & -given)
    wide = scales.float().repeat_interleave(given // group_size, 1)
    return F.pad(wide, (0, -(-columns // group_size) - wide.shape[1])).contiguous(), group_size


def pack_blocks(codes: Tensor) -> Tensor:
    """Codes int8 -8 ... 7 [N, K] as uint8 [ceil(N / 4), ceil(K / 128), 4, 64].

    Byte 16 j + i of 64 holds code + 8 of column 32 j + i, and in its upper half of column 32 j + 16 + i, so that any 32 columns from a
    multiple of 32 are 16 bytes. Rows and columns that pad a block have code 0.
    """
    rows, columns = codes.shape
    lifted = F.pad(codes, (0, -columns % BLOCK, 0, -rows % ROWS)).add(8).view(torch.uint8)
    lifted = lifted.view(len(lifted) // ROWS, ROWS, -1, 4, 2, 16).transpose(1, 2)
    return (lifted[..., 0, :] | (lifted[..., 1, :] << 4)).contiguous().flatten(-2)


def unpack_blocks(blocks: Tensor, out_features: int, in_features: int) -> Tensor:
    """The codes int8 [out_features, in_features] of `pack_blocks`."""
    return _unpacked(blocks.transpose(1, 2)).view(ROWS * len(blocks), -1)[:out_features, :in_features]


def block_rows(blocks: Tensor, index: Tensor, in_features: int) -> Tensor:
    """The codes int8 [T, in_features] of rows `index` int64 [T] of `pack_blocks`."""
    return _unpacked(blocks[index // ROWS, :, index % ROWS]).flatten(1)[:, :in_features]


def _unpacked(octets: Tensor) -> Tensor:
    """The codes int8 [..., 4, 2, 16] in the bytes [..., 64] of rows of blocks."""
    octets = octets.unflatten(-1, (4, 16))
    return torch.stack((octets & 15, octets >> 4), dim=-2).view(torch.int8) - 8


def _wide(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float().contiguous()
