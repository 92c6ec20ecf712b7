"""A linear that keeps NF4 (or FP4) weights as bitsandbytes stores them, both levels of scales included.

Shapes: N output features, K input features, G blocks of a row that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from hone.base.errors import ArtifactError, SpecError
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.layouts import layout_of
from hone.model.quantized.layouts.bitsandbytes_4bit import Bitsandbytes4, nested
from hone.model.quantized.scheme import Scheme
from hone.ops import dequantize_nf4
from hone.ops.nf4.reference import NESTED_BLOCK, Nested, table
from hone.parallel.cut import Cut


class NF4(Dequantizing):
    """y = x W^T + b with W of 4-bit indices into a table: 4.13 bits a weight with scales quantized again, 4.5 without. arXiv:2305.14314.

    `codes` uint8 [N, K / 2] and `scales` [N, G] (float32, or uint8 indices) are the bytes of the checkpoint; `outer` and
    `offsets` float32 belong to every 256 scales of a checkpoint module, and begin anew with each.
    """

    paper: ClassVar[str] = "arXiv:2305.14314"

    def __init__(self, in_features: int, out_features: int, bias: bool, *, scheme: Scheme) -> None:
        super().__init__(in_features, out_features, bias, scheme=scheme)
        self.doubled = scheme.layout.endswith("-nested")
        groups = (out_features, scheme.num_groups(in_features))
        self.codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8)
        self.scales = torch.empty(groups, dtype=torch.uint8 if self.doubled else torch.float32)
        for name, size in (("values", 256), ("outer", 0), ("offsets", 0)):
            self.register_buffer(name, torch.empty(size) if self.doubled else None)
        self.modules_at: list[tuple[int, int]] = [(0, 0)]
        """(first row, first of the outer scales) of each checkpoint module, or of runs of them without a block cut short."""

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        layout = layout_of(self.scheme)
        assert isinstance(layout, Bitsandbytes4), f"{self.scheme.layout} is not bitsandbytes' layout"
        found = [layout.described(self.scheme, part, self.in_features) for part in parts]
        groups = self.scales.shape[1]
        self.codes = torch.cat([packed.view(-1, self.in_features // 2) for packed, _ in found])
        assert len(self.codes) == self.out_features, f"stacked to {tuple(self.codes.shape)}"
        self.scales = torch.cat([part["weight.absmax"].view(-1, groups) for part in parts])
        self.raw = [{layout.state: part[layout.state].cpu()} for part in parts]
        if self.doubled:
            scales = [nested(part, state) for part, (_, state) in zip(parts, found, strict=True)]
            self.values = scales[0].values
            if any(not torch.equal(one.values, self.values) for one in scales[1:]):
                raise ArtifactError(
                    "the modules of one fused linear have different nested_quant_map", fix="quantize the model again"
                )
            self.outer = torch.cat([one.scales for one in scales])
            self.offsets = torch.cat([one.offsets for one in scales])
        self._place([len(packed) // (self.in_features // 2) for packed, _ in found])
        if self.bias is not None:
            self.bias = torch.cat([part["bias"] for part in parts])

    def _place(self, rows: list[int]) -> None:
        """Notes where the scales of checkpoint modules of `rows` rows each begin; they run on where blocks of scales are whole."""
        self.modules_at, row, outer, whole = [], 0, 0, False
        for count in rows:
            if not whole:
                self.modules_at.append((row, outer))
            blocks = count * self.scales.shape[1]
            row, outer, whole = row + count, outer + -(-blocks // NESTED_BLOCK), blocks % NESTED_BLOCK == 0

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        assert len(self.raw) == len(rows), f"{len(self.raw)} modules cannot be split as {rows}"
        number, parts, begin, outer = self.scheme.number, [], 0, 0
        for count, state in zip(rows, self.raw, strict=True):
            here = slice(begin, begin + count)
            begin += count
            part = {
                "weight": self.codes[here].reshape(-1, 1),
                "weight.absmax": self.scales[here].flatten(),
                "weight.quant_map": table(number, torch.device("cpu")).clone(),
                **state,
            }
            if self.doubled:
                size = -(-count * self.scales.shape[1] // NESTED_BLOCK)
                part["weight.nested_absmax"] = self.outer[outer : outer + size]
                part["weight.nested_quant_map"] = self.values.clone()
                outer += size
            if self.bias is not None:
                part["bias"] = self.bias[here]
            parts.append(part)
        return parts

    def _tile(self, piece: slice | Tensor, dtype: torch.dtype) -> Tensor:
        number = self.scheme.number
        if not self.doubled:
            return dequantize_nf4(self.codes[piece], self.scales[piece], dtype, number=number)
        if isinstance(piece, Tensor):  # rows in any order: their scales are read one level at a time
            return dequantize_nf4(self.codes[piece], self._float_scales()[piece], dtype, number=number)
        begin, end, _ = piece.indices(self.out_features)
        found = []
        for first, last, scales in self._nested(begin, end):
            here = slice(first, last)
            found.append(dequantize_nf4(self.codes[here], self.scales[here], dtype, number=number, nested=scales))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _nested(self, begin: int, end: int) -> list[tuple[int, int, Nested]]:
        """(first row, last row, their scales) of rows `begin` to `end`, for every run of checkpoint modules."""
        ends = [row for row, _ in self.modules_at[1:]] + [self.out_features]
        groups, found = self.scales.shape[1], []
        for (row, outer), stop in zip(self.modules_at, ends, strict=True):
            first, last = max(begin, row), min(end, stop)
            if first < last:
                scales = Nested(self.values, self.outer[outer:], self.offsets[outer:], (first - row) * groups)
                found.append((first, last, scales))
        return found

    def _float_scales(self) -> Tensor:
        """Scales float32 [N, G] of all rows."""
        runs = self._nested(0, self.out_features)
        return torch.cat([scales.unnested(self.scales[first:last]) for first, last, scales in runs])

    def plain_codes(self) -> tuple[Tensor, Tensor]:
        indices = torch.stack((self.codes >> 4, self.codes & 15), dim=-1).view(len(self.codes), -1)
        return indices.view(torch.int8) - 8, self._float_scales() if self.doubled else self.scales

    def cut(self, cut: Cut, *, bias: bool) -> NF4:
        """The linear of some rows, or of some columns, with the bias of its rows or none; scales that were quantized again are float32.

        Raises SpecError for columns that begin or end inside a block.
        """
        start, stop = cut.ranges[0] if cut.axis == 1 else (0, self.in_features)
        size = self.scheme.group_size
        if start % size or stop % size:
            raise SpecError(
                f"columns {start} to {stop} of a weight [{self.out_features}, {self.in_features}] begin or end inside a block of {size} codes",
                fix="lower parallelism.tensor_parallel_degree, or compress the model with a smaller group_size",
            )
        with torch.device(self.codes.device):
            scheme = replace(self.scheme, layout=self.scheme.layout.removesuffix("-nested"))
            found = NF4(stop - start, cut.local_shape[0], bias and self.bias is not None, scheme=scheme)
        if self.codes.is_meta:
            return found
        scales = self._float_scales() if self.doubled else self.scales
        rows = (
            torch.cat([torch.arange(*one) for one in cut.ranges]) if cut.axis == 0 else torch.arange(self.out_features)
        )
        rows = rows.to(self.codes.device)
        found.codes = self.codes[rows, start // 2 : stop // 2]
        found.scales = scales[rows, start // size : stop // size]
        if found.bias is not None and self.bias is not None:
            found.bias = self.bias[rows]
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4:
        """Implements `.to(...)`: scales stay float32, as in the checkpoint."""

        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype or tensor is self.bias else tensor.to(found.device)

        super()._apply(moved, recurse)
        return self
