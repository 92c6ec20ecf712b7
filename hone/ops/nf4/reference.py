"""NF4 and FP4 in plain torch: rounding to the values of a table, and back; the kernel's reference, and the CPU path.

Shapes: N output features, K input features, W weights of a block that share a scale, G = K / W.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hone.ops.rounding import numbers

NESTED_BLOCK = 256
"""Scales that share a scale of their own."""
SMALLEST = 1e-38
"""What bitsandbytes divides an all-zero block by."""


TILE_VALUES = 1 << 22
"""Weights that are rounded at a time."""


class Nested(NamedTuple):
    """Scales that were quantized again: 8-bit indices into `values` float32 [256], times `scales`, plus `offsets`.

    `scales` and `offsets` are float32, one for every 256 blocks from the first of the matrix on; block 0 of the rows given
    is block `first` of the matrix.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor
    first: int = 0

    def unnested(self, codes: Tensor) -> Tensor:
        """The scales float32 [N, G] of indices uint8 [N, G]."""
        at = torch.arange(self.first, self.first + codes.numel(), device=codes.device) // NESTED_BLOCK
        found = self.values[codes.flatten().int()] * self.scales[at] + self.offsets[at]
        return found.view(codes.shape)


def quantize(weights: Tensor, number: str, block_size: int) -> tuple[Tensor, Tensor]:
    """(codes int8 [N, K], the largest magnitude of each block float32 [N, G]) of float weights [N, K]; a code is its index less 8.

    Bit for bit as bitsandbytes 0.50: a step between two values becomes the lower one when it is halfway.
    """
    tiles = weights.split(max(1, TILE_VALUES // weights.shape[1]))  # what is computed between takes no second matrix
    codes, scales = zip(*(_quantize(tile, number, block_size) for tile in tiles), strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantize(weights: Tensor, number: str, block_size: int) -> tuple[Tensor, Tensor]:
    blocks = weights.float().reshape(len(weights), -1, block_size)
    scales = blocks.abs().amax(-1)
    steps = (blocks * (1.0 / scales.clamp(min=SMALLEST)).unsqueeze(-1)).clamp_(-1, 1)
    return numbers.nearest(steps, number).view(weights.shape), scales


def dequantize(codes: Tensor, scales: Tensor, number: str, dtype: torch.dtype, nested: Nested | None) -> Tensor:
    """As `hone.ops.dequantize_nf4`."""
    if nested is not None:
        scales = nested.unnested(scales)
    wide = torch.promote_types(torch.float32, dtype)
    pairs = _pairs(number, codes.device, wide).index_select(0, codes.flatten().int())
    values = pairs.view(*scales.shape, -1).mul_(scales.to(wide).unsqueeze(-1))
    return values.view(len(codes), -1).to(dtype)


@cache
def table(number: str, device: torch.device) -> Tensor:
    """The 16 values of the format, float32."""
    found = numbers.NUMBERS[number]
    assert isinstance(found, numbers.Values), f"{number} has no table of values"
    return torch.tensor(found.values, dtype=torch.float32, device=device)


@cache
def _pairs(number: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two values of every byte [256, 2]: that of the high nibble first."""
    values, byte = table(number, torch.device("cpu")), torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), 1).to(device, dtype)


@cache
def dynamic_map() -> Tensor:
    """bitsandbytes' 256 values of 8-bit dynamic quantization, float32, ascending (Dettmers 2016, arXiv:1511.04561):
    seven decades, the i-th with 2^i midpoints of equal steps from a tenth of its end, both signs, 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(values), dtype=torch.float32)
