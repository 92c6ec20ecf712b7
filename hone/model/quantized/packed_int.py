"""A linear with symmetric integer weights that stay packed in memory.

Shapes: N output features, K input features, G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.model.quantized.layouts import layout_of, shapes_of
from hone.model.quantized.scheme import Scheme, Stored
from hone.ops import formats, frozen_linear, quantized_linear
from hone.ops.dispatch import Choice, choose, locate, runs_kernel
from hone.ops.linear.api import cpu_quantized, cpu_unpacked
from hone.ops.linear.cpu_weights import (
    STORED,
    CpuWeight,
    block_rows,
    block_weight,
    byte_weight,
    pack_blocks,
    unpack_blocks,
)
from hone.ops.moe.weights import block_of, unpack_pairs

TILE_VALUES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Weights that are unpacked at a time: they fit a CPU's cache and occupy a GPU."""

UNPACKED_VALUES = 1 << 24
"""4-bit weights that a CPU's kernel unpacks at a time: copying pieces of the output costs more than leaving the cache."""


class PackedInt(nn.Module):
    """y = x W^T + b with W kept as integer codes and scales, unpacked tile by tile; scales of blocks once for each of their rows.

    In memory the codes take their packed size: int8 [N, K] for 8 bits, two rows to a byte for 4 bits (row n in the low
    nibble, row n + N/2 in the high one, so that unpacking is two contiguous shifts), the checkpoint's words otherwise. On a
    CPU with compiled kernels 4-bit codes are stored in blocks of 128 columns (`cpu_weights.pack_blocks`).
    On a GPU with a kernel for them, codes of 4 and 8 bits and their scales are stored in the kernel's order
    (`formats.tile_codes`); a move between devices rearranges them.
    """

    paper: ClassVar[str] = ""

    def __init__(self, in_features: int, out_features: int, bias: bool, *, scheme: Scheme) -> None:
        super().__init__()
        bits = scheme.bits
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.halves = bits == 4 and out_features % 2 == 0
        self.tiled = self.blocked = False
        self.grouped = False
        """Whether it is one of several experts whose codes are in one tensor on a GPU; its own are then not in tiles."""
        self.pairs = 0
        """Columns of a block of 4-bit codes in pairs (`hone.ops.moe.weights.pack_pairs`), as experts have them there; 0: none."""
        self._on_cpu: CpuWeight | None = None
        self._on_cpu_of = 0  # the address of the codes that it was made of
        if bits == 8:
            codes = torch.empty(out_features, in_features, dtype=torch.int8)
        elif self.halves:
            codes = torch.empty(out_features // 2, in_features, dtype=torch.int8)
        else:
            codes = torch.empty(out_features, formats.num_words(in_features, bits), dtype=torch.int32)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.empty(out_features, self.scheme.num_groups(in_features)))
        self.register_buffer("bias", torch.empty(out_features) if bias else None)
        self.raw: list[dict[str, Tensor]] = []  # of each module, what the layout writes back as it was

    @property
    def integers(self) -> frozenset[str]:
        """Suffixes of the checkpoint tensors that hold integers."""
        return layout_of(self.scheme).integers

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Stacks checkpoint modules on output rows, each with the tensors of its layout and a "bias" if there is one."""
        stored = [layout_of(self.scheme).read(self.scheme, part, self.in_features) for part in parts]
        codes = _stack([one.codes for one in stored])
        assert codes.shape == (self.out_features, self.in_features), f"stacked to {tuple(codes.shape)}"
        scales = [self.scheme.by_row(one.scales, *one.codes.shape) for one in stored]
        self._keep(codes, _stack(scales))
        self.raw = [one.raw[0] for one in stored if one.raw]
        if self.bias is not None:
            self.bias = _stack([part["bias"] for part in parts])

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The checkpoint tensors, split at `rows` output rows each."""
        assert sum(rows) == self.out_features, f"{rows} do not add up to {self.out_features}"
        pieces = zip(self._codes(slice(None)).split(rows), self._scales().split(rows), strict=True)
        layout = layout_of(self.scheme)
        raw = [{0: tensors} for tensors in self.raw] or [{}] * len(rows)
        whole = [
            Stored(self.scheme, codes, self.scheme.by_block(scales, self.in_features).contiguous(), raw=kept)
            for (codes, scales), kept in zip(pieces, raw, strict=True)
        ]
        parts = [layout.write(one) for one in whole]
        if self.bias is not None:
            for part, bias in zip(parts, self.bias.split(rows), strict=True):
                part["bias"] = bias
        return parts

    def part_shapes(self, rows: list[int]) -> list[dict[str, tuple[int, ...]]]:
        """What `load` expects: the shape of every tensor of each part."""
        shapes = [shapes_of(self.scheme, count, self.in_features) for count in rows]
        if self.bias is not None:
            for shape, count in zip(shapes, rows, strict=True):
                shape["bias"] = (count,)
        return shapes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype`: for conversions and training, where it is forgotten after each product."""
        return formats.dequantize(self._codes(slice(None)), self._scales(), dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [T, K] in `dtype` of rows `index` int64 [T]; no others are unpacked, in whichever order codes are stored."""
        if self.tiled:
            codes = formats.tiled_rows(self.codes, index, self.scheme.bits)
            return formats.dequantize(codes, formats.tiled_scales(self.scales, index), dtype)
        if self.blocked:
            codes = block_rows(self.codes, index, self.in_features)
        elif self.pairs:
            codes = unpack_pairs(self.codes[index], self.pairs)
        elif self.halves:
            half = self.out_features // 2
            pairs = self.codes[index % half]
            codes = torch.where((index < half).unsqueeze(-1), (pairs << 4) >> 4, pairs >> 4)
        else:
            codes = self.codes[index]
            codes = codes if self.scheme.bits == 8 else formats.unpack(codes, self.scheme.bits, self.in_features)
        return formats.dequantize(codes, self.scales[index], dtype)

    @property
    def stacks(self) -> bool:
        """Whether a kernel multiplies such weights of all experts at once: codes of 4 or 8 bits in blocks of columns."""
        groups = self.scheme.num_groups(self.in_features)
        return self.scheme.bits in (4, 8) and block_of(self.in_features, groups) > 0

    def plain_codes(self) -> tuple[Tensor, Tensor]:
        """Codes int8 [N, K] and scales [N, G]."""
        return self._codes(slice(None)), self._scales()

    def adopt(self, values: Tensor, scales: Tensor) -> None:
        """Keeps its weights in `values` [N, K] or pairs [N, K / 2] and `scales` [G, N], parts of tensors of all experts."""
        self.tiled = self.blocked = self.halves = False
        self.pairs = block_of(self.in_features, len(scales)) if self.scheme.bits == 4 else 0
        self.codes, self.scales, self._on_cpu = values, scales.T, None

    def overwritten(self) -> None:
        """Forgets what was made of codes and scales whose values have changed in place."""
        self._on_cpu = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] float -> [..., N] in x's dtype; codes and scales are multiplied in x's dtype.

        With one scale per row the outputs are scaled instead of the weights: N products instead of N x K, and no
        rounding of weights in 16-bit formats.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            return frozen_linear(x, self.dequantize, self.bias)
        if self.tiled:
            options = {"bits": self.scheme.bits, "out_features": self.out_features}
            return quantized_linear(x, self.codes, self.scales, self.bias, **options)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            # The compiled kernel rounds x to 16 bits: x in float32 is multiplied in float32 outside an engine's compiled step.
            few = x.numel() // max(1, x.shape[-1])
            if x.dtype != torch.float32 and self.on_cpu(x.dtype, few).backend == "compiled":
                return cpu_quantized(x, self.cpu_weight())
            if self.blocked and x.dtype in STORED:
                return self._unpacked(x)
        rows = self.out_features // 2 if self.halves else self.out_features
        values = self.in_features * (2 if self.halves else 1)
        tile = max(1, TILE_VALUES.get(x.device.type, 1 << 20) // values)
        if tile >= rows:
            out = F.linear(x, self._tile(slice(0, rows), x.dtype))
        else:
            out = x.new_empty(*x.shape[:-1], self.out_features)
            for start in range(0, rows, tile):
                piece = slice(start, min(start + tile, rows))
                y = F.linear(x, self._tile(piece, x.dtype))
                if self.halves:
                    out.unflatten(-1, (2, rows))[..., piece] = y.unflatten(-1, (2, -1))
                else:
                    out[..., piece] = y
        if self.scales.shape[1] == 1:
            out = out.mul_(self.scales.view(-1))
        return out if self.bias is None else out.add_(self.bias)

    def on_cpu(self, dtype: torch.dtype, rows: int) -> Choice:
        """How a CPU's compiled step multiplies `rows` rows of x of `dtype` by this weight."""
        shape = {"group_size": self.scheme.extent(1, self.in_features)[1], "in_features": self.in_features}
        options = {"bits": self.scheme.bits, "tiled": self.scheme.bits != 8 and not self.blocked, "plain": True}
        return choose("quantized_linear", locate("cpu"), dtype=dtype, rows=rows, **shape, **options)

    def cpu_weight(self) -> CpuWeight:
        """The weight for a program of compiled operations (`hone.ops.cpu.program`)."""
        if self._on_cpu is None or self._on_cpu_of != self.codes.data_ptr():
            self._on_cpu_of = self.codes.data_ptr()
            if self.blocked:
                self._on_cpu = block_weight(self.codes, self.scales, self.in_features, self.bias)
            else:
                self._on_cpu = byte_weight(self.codes, self.scales, self.bias)
        return self._on_cpu

    def _unpacked(self, x: Tensor) -> Tensor:
        """The product of many rows: blocks of 4-bit codes are unpacked by a compiled kernel, tile by tile."""
        weight, tile = self.cpu_weight(), max(16, UNPACKED_VALUES // self.in_features // 16 * 16)
        if tile >= self.out_features:
            out = F.linear(x, cpu_unpacked(weight, slice(None), x.dtype))
        else:
            out = x.new_empty(*x.shape[:-1], self.out_features)
            for start in range(0, self.out_features, tile):
                out[..., start : start + tile] = F.linear(x, cpu_unpacked(weight, slice(start, start + tile), x.dtype))
        if self.scales.shape[1] == 1:
            out = out.mul_(self.scales.view(-1))
        return out if self.bias is None else out.add_(self.bias)

    def extra_repr(self) -> str:
        scheme = self.scheme
        return f"{self.in_features}, {self.out_features}, bits={scheme.bits}, group_size={scheme.group_size}"

    def _tile(self, piece: slice, dtype: torch.dtype) -> Tensor:
        """Weights of rows `piece`, then (with halves) of rows `piece` + N/2; unscaled codes where a row has one scale."""
        groups = self.scales.shape[1]
        if not self.halves:
            codes = self._codes(piece)
            return codes.to(dtype) if groups == 1 else formats.dequantize(codes, self.scales[piece], dtype)
        codes = self.codes[piece]
        rows, columns = codes.shape
        weights = torch.empty(2, rows, columns, dtype=dtype, device=codes.device)
        weights[0].copy_((codes << 4) >> 4)
        weights[1].copy_(codes >> 4)
        if groups > 1:
            scales = self.scales.view(2, -1, groups, 1)[:, piece].to(dtype)
            weights.view(2, rows, groups, columns // groups).mul_(scales)
        return weights.view(2 * rows, columns)

    def _codes(self, piece: slice) -> Tensor:
        """Codes int8 of rows `piece` (all rows when the halves share bytes)."""
        if self.tiled:
            return formats.untile_codes(self.codes, self.out_features, self.scheme.bits)[piece]
        if self.blocked:
            return unpack_blocks(self.codes, self.out_features, self.in_features)[piece]
        if self.pairs:
            return unpack_pairs(self.codes[piece], self.pairs)
        if self.halves:
            return torch.cat(((self.codes << 4) >> 4, self.codes >> 4))[piece]
        codes = self.codes[piece]
        return codes if self.scheme.bits == 8 else formats.unpack(codes, self.scheme.bits, self.in_features)

    def _scales(self) -> Tensor:
        """Scales [N, G]."""
        return formats.untile_scales(self.scales, self.out_features) if self.tiled else self.scales

    def _keep(self, codes: Tensor, scales: Tensor) -> None:
        """Stores codes int8 [N, K] and scales [N, G] in the layout of their device."""
        self.tiled, self.blocked = self._wanted(codes.device)
        self.pairs = 0
        self.halves = self.scheme.bits == 4 and self.out_features % 2 == 0 and not (self.tiled or self.blocked)
        self._on_cpu = None
        if self.tiled:
            codes, scales = formats.tile_codes(codes, self.scheme.bits), formats.tile_scales(scales)
        elif self.blocked:
            codes = pack_blocks(codes)
        elif self.halves:
            low, high = codes.chunk(2)
            codes = (low & 15) | (high << 4)
        elif self.scheme.bits < 8:
            codes = formats.pack(codes, self.scheme.bits)
        self.codes, self.scales = codes, scales

    def _wanted(self, device: torch.device) -> tuple[bool, bool]:
        """Whether the codes are stored (in tiles for a GPU's kernel, in blocks for a CPU's) on `device`."""
        return not self.grouped and tiles_on(device, self.scheme, self.in_features), blocks_on(
            device, self.scheme, self.in_features
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedInt:
        """Implements `.to(...)`; a move between a GPU and a CPU rearranges the codes."""
        super()._apply(fn, recurse)
        if self.codes.device.type != "meta":
            if (self.tiled, self.blocked) != self._wanted(self.codes.device) or self.pairs:
                self._keep(self._codes(slice(None)), self._scales())
            self._on_cpu = None
        return self


def blocks_on(device: torch.device, scheme: Scheme, in_features: int) -> bool:
    """Whether a compiled kernel of a CPU reads 4-bit weights of `scheme` in blocks."""
    if device.type != "cpu" or scheme.bits != 4:
        return False
    case = {"bits": 4, "group_size": scheme.extent(1, in_features)[1], "in_features": in_features}
    return runs_kernel("quantized_linear", device, **case, dtype=torch.float32, rows=1, tiled=False, plain=True)


def tiles_on(device: torch.device, scheme: Scheme, in_features: int) -> bool:
    """Whether a kernel of `device` multiplies weights of `scheme` in tiles, for 16-bit x without gradient."""
    case = {"bits": scheme.bits, "group_size": scheme.extent(1, in_features)[1], "in_features": in_features}
    tiled = scheme.bits in (4, 8) and in_features % 64 == 0
    return tiled and runs_kernel(
        "quantized_linear", device, **case, dtype=torch.bfloat16, rows=1, tiled=True, plain=True
    )


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
