"""The weights of all experts of a layer as kernels read them: dense, or codes of 4 or 8 bits with scales of groups of columns.

Legend: E experts, N output features, K input features, G groups of K / G columns that share a scale.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.rounding.numbers import decode

FP8 = torch.float8_e4m3fn
WIDEST = 128
"""Most columns of a block: its scale multiplies the block's sum of products."""


Rounding = Literal["int8", "fp8"]
"""What inputs of experts are rounded to, with a scale a token (`hone.ops.input_codes`)."""


class ExpertWeights(NamedTuple):
    """[E, N, K]: `values` of 16, 32 or 64 bits without scales; or int8, e4m3 or, two 4-bit codes a byte, uint8 [E, N, K / 2]
    (`pack_pairs`) with `scales` float [E, G, N], or uint8 where codes are e2m1 and scales powers of two (MXFP4: exponents + 127).
    `bias` float [E, N] is added to each expert's products."""

    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None

    @property
    def kind(self) -> str:
        """'dense', 'int4', 'mxfp4', 'int8' or 'fp8'."""
        if self.scales is not None and self.scales.dtype == torch.uint8:
            return "mxfp4"
        return {torch.uint8: "int4", torch.int8: "int8", FP8: "fp8"}.get(self.values.dtype, "dense")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, rows, columns = self.values.shape
        return experts, rows, columns * (2 if self.values.dtype == torch.uint8 else 1)

    @property
    def block(self) -> int:
        """Columns that are multiplied before a scale is: those of a group, at most 128; 0 for dense weights."""
        return 0 if self.scales is None else block_of(self.sizes[2], self.scales.shape[1])

    def expert(self, index: int) -> ExpertWeights:
        """Those of one expert, [1, N, K]."""
        own = slice(index, index + 1)
        return ExpertWeights(*(None if one is None else one[own] for one in self))  # type: ignore[arg-type]

    def contiguous(self) -> ExpertWeights:
        """The same with contiguous tensors."""
        return ExpertWeights(*(None if one is None else one.contiguous() for one in self))  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [E, N, K] in `dtype`, code times scale rounded once, without the bias."""
        if self.scales is None:
            return self.values.to(dtype)
        codes = unpack_pairs(self.values, self.block) if self.values.dtype == torch.uint8 else self.values
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales
        if self.kind == "mxfp4":
            codes, scales = decode(codes, "e2m1", wide), scales.view(torch.float8_e8m0fnu)
        grouped = codes.to(wide).unflatten(-1, (scales.shape[1], -1))
        return (grouped * scales.to(wide).mT.unsqueeze(-1)).flatten(-2).to(dtype)


def block_of(columns: int, groups: int) -> int:
    """Columns of a block of `columns` with `groups` scales: the group's, or the largest power of two in it up to 128.

    0 where no block of at least 32 columns has one scale.
    """
    width = columns // groups if groups and columns % groups == 0 else 0
    block = min(WIDEST, width & -width)
    return block if block >= 32 else 0


def pack_pairs(codes: Tensor, block: int) -> Tensor:
    """Codes int8 [..., K] from -8 to 7 as uint8 [..., K / 2]: byte c of a block of columns has column c in its low and column
    c + block / 2 in its high half, each plus 8."""
    low, high = (codes.unflatten(-1, (-1, 2, block // 2)) + 8).to(torch.uint8).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def unpack_pairs(pairs: Tensor, block: int) -> Tensor:
    """The codes int8 [..., K] of `pack_pairs`."""
    bytes_ = pairs.unflatten(-1, (-1, block // 2))
    return (torch.stack((bytes_ & 15, bytes_ >> 4), -2).to(torch.int8) - 8).flatten(-3)


def check_weights(name: str, weights: ExpertWeights) -> None:
    """Raises SpecError for tensors that are no weights of experts."""
    values, scales, bias = weights
    if values.dim() != 3 or not len(values):
        raise SpecError(
            f"{name} has shape {tuple(values.shape)}, not [E, N, K] of at least one expert",
            fix="stack the weights of all experts, output features first",
        )
    if (scales is None) != (weights.kind == "dense"):
        given = "no scales" if scales is None else "scales"
        raise SpecError(
            f"{name} is {values.dtype} with {given}",
            fix="give scales [E, G, N] with codes (uint8 pairs, int8, e4m3), and none with floats",
        )
    if bias is not None and bias.shape != values.shape[:2]:
        raise SpecError(
            f"{name} has weights of {values.shape[0]} x {values.shape[1]} features and biases {tuple(bias.shape)}",
            fix="give one bias for each output feature of each expert, [E, N], or none",
        )
    if scales is not None:
        experts, rows, columns = weights.sizes
        if scales.dim() != 3 or (len(scales), scales.shape[2]) != (experts, rows) or not weights.block:
            raise SpecError(
                f"{name} has {columns} columns and scales {tuple(scales.shape)}, which are not [{experts}, G, {rows}]",
                fix="give one scale for each row and group of columns, a multiple of 32 of them, transposed to [E, G, N]",
            )
