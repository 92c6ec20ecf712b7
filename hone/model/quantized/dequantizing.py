"""A linear that keeps its codes as stored and dequantizes them tile by tile: floats, NF4, zero points, blocks, one scale for all.

Shapes: N output features, K input features, G groups of columns that share a scale.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.base.errors import ArtifactError
from hone.model.quantized.layouts import layout_of, shapes_of
from hone.model.quantized.scheme import BYTE_SCALES, Scheme, Stored, dequantize
from hone.ops import formats, fp8_linear, frozen_linear, input_codes
from hone.ops.dispatch import runs_kernel
from hone.ops.moe.weights import block_of, unpack_pairs
from hone.ops.rounding.numbers import scale_values

TILE_VALUES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Weights that are dequantized at a time."""


class Dequantizing(nn.Module):
    """y = x W^T + b with W kept as codes and scales of any scheme, dequantized tile by tile.

    In memory a code takes a byte, or 1 / n of a word where the checkpoint packs n codes. Scales (and zero points) are
    expanded to G per row, also where several rows share them in the checkpoint. `raw` holds the tensors of each module
    that the layout writes back as they were.
    """

    paper: ClassVar[str] = ""

    def __init__(self, in_features: int, out_features: int, bias: bool, *, scheme: Scheme) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.packed = scheme.bits < 8
        self.width = scheme.extent(out_features, in_features)[1]
        columns = formats.num_words(in_features, scheme.bits) if self.packed else in_features
        codes = torch.empty(out_features, columns, dtype=torch.int32 if self.packed else torch.int8)
        groups = (out_features, scheme.num_groups(in_features))
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.empty(groups, dtype=None if scheme.scales == "float" else torch.uint8))
        divided = torch.empty(out_features, 1) if scheme.scales == "e4m3" else None
        self.register_buffer("global_scales", divided)
        self.register_buffer("zero_points", None if scheme.symmetric else torch.empty(groups, dtype=torch.int8))
        index = torch.empty(in_features, dtype=torch.int32) if scheme.permuted else None
        self.register_buffer("index", index)
        self.register_buffer("bias", torch.empty(out_features) if bias else None)
        self.raw: list[dict[str, Tensor]] = []
        self.whole_blocks = False  # every block of scales lies in one module
        self._wide: Tensor | None = None
        self.pairs = 0
        """Columns of a block of 4-bit codes in pairs (`hone.ops.moe.weights.pack_pairs`), as experts have them on a GPU; 0: none."""

    @property
    def integers(self) -> frozenset[str]:
        """Suffixes of the checkpoint tensors that hold codes, not numbers."""
        return layout_of(self.scheme).integers

    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Stacks checkpoint modules on output rows, each with the tensors of its layout."""
        stored = [layout_of(self.scheme).read(self.scheme, part, self.in_features) for part in parts]
        # Stored as bytes or words, so that `.to(dtype)` of the module does not convert codes.
        bits = self.scheme.bits
        self.codes = _stack(
            [formats.pack(one.codes, bits) if self.packed else one.codes.view(torch.int8) for one in stored]
        )
        assert len(self.codes) == self.out_features, f"stacked to {tuple(self.codes.shape)}"
        scales = [self._by_row(one.scales, one) for one in stored]
        self.scales = _stack([one.view(torch.uint8) if one.dtype.itemsize == 1 else one for one in scales])
        if self.global_scales is not None:
            self.global_scales = torch.cat([one.global_scale.expand(len(one.codes), 1) for one in stored])
        if not self.scheme.symmetric:
            self.zero_points = _stack([self._by_row(one.zero_points, one) for one in stored])
        if self.scheme.permuted:
            self.index = _same([one.index for one in stored])
        self.raw = [one.raw[0] for one in stored if one.raw]
        self._wide, self.pairs = None, 0
        self.whole_blocks = self.scheme.block is not None and all(
            len(one.codes) % self.scheme.block[0] == 0 for one in stored[:-1]
        )
        if self.bias is not None:
            self.bias = _stack([part["bias"] for part in parts])

    def parts(self, rows: list[int]) -> list[dict[str, Tensor]]:
        """The checkpoint tensors, split at `rows` output rows each."""
        assert sum(rows) == self.out_features, f"{rows} do not add up to {self.out_features}"
        assert not self.raw or len(self.raw) == len(rows), f"{len(self.raw)} modules cannot be split as {rows}"
        parts, begin = [], 0
        for position, count in enumerate(rows):
            here = slice(begin, begin + count)
            begin += count
            points = (
                None if self.zero_points is None else self.scheme.by_block(self.zero_points[here], self.in_features)
            )
            scales = self.scheme.by_block(self._scales(here), self.in_features).contiguous()
            divisor = None if self.global_scales is None else self.global_scales[here][0]
            raw = {0: self.raw[position]} if self.raw else {}
            stored = Stored(self.scheme, self._codes(here), scales, points, self.index, raw, divisor)
            part = layout_of(self.scheme).write(stored)
            if self.bias is not None:
                part["bias"] = self.bias[here]
            parts.append(part)
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
        return self._tile(slice(None), dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights [T, K] in `dtype` of rows `index` int64 [T]; no others are dequantized."""
        return self._tile(index, dtype)

    @property
    def stacks(self) -> bool:
        """Whether a kernel multiplies such weights of all experts at once: e4m3 in blocks of columns or MXFP4, inputs as they are."""
        return self.stacks_whole_inputs and self.scheme.activations is None

    @property
    def stacks_whole_inputs(self) -> bool:
        """`stacks`, whatever becomes of the inputs."""
        scheme = self.scheme
        plain = scheme.symmetric and not scheme.permuted
        fits = block_of(self.in_features, scheme.num_groups(self.in_features)) > 0
        return plain and fits and (scheme.number, scheme.scales) in (("e4m3", "float"), ("e2m1", "e8m0"))

    def plain_codes(self) -> tuple[Tensor, Tensor]:
        """Codes [N, K], one a byte, and scales [N, G]; those of MXFP4 are exponents + 127 in uint8."""
        return self._codes(slice(None)), self.scales if self.packed else self._scales(slice(None))

    def adopt(self, values: Tensor, scales: Tensor) -> None:
        """Keeps its weights in `values` [N, K] or pairs [N, K / 2] and `scales` [G, N], parts of tensors of all experts."""
        self.pairs = block_of(self.in_features, len(scales)) if self.packed else 0
        self.codes, self.scales, self._wide = values if self.packed else values.view(torch.int8), scales.T, None

    def overwritten(self) -> None:
        """Forgets what was made of codes and scales whose values have changed in place."""
        self._wide = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] float -> [..., N] in x's dtype; codes and scales are multiplied in x's dtype, or float32 (`dequantize`).

        On a GPU with fp8 products, weights of the fine-grained fp8 layout are multiplied as codes, as transformers does:
        inputs are rounded to fp8 in groups of 128 (their `activation_scheme` is dynamic).
        """
        if self.scheme.layout == "fp8" and self._has_blocks_of_codes(x):
            return self._code_product(x, "fp8", None)
        if torch.is_grad_enabled() and x.requires_grad:
            return frozen_linear(x, self.dequantize, self.bias)
        return self._product(x, self.bias)

    def _has_blocks_of_codes(self, x: Tensor) -> bool:
        """Whether a kernel multiplies e4m3 inputs with these weights, which have a scale for each 128 x 128."""
        fits = self.scheme.number == "e4m3" and self.scheme.block == (128, 128) and self.whole_blocks
        return fits and self.in_features % 128 == 0 and self._runs_codes(x)

    def _runs_codes(self, x: Tensor, *, integer: bool = False) -> bool:
        if (
            not x.is_cuda
            or x.dtype not in (torch.bfloat16, torch.float16)
            or (torch.is_grad_enabled() and x.requires_grad)
        ):
            return False
        case = {"rows": 1, "out_features": self.out_features, "in_features": self.in_features, "blockwise": False}
        return runs_kernel("fp8_linear", x.device, dtype=x.dtype, **case, integer=integer)

    def _code_product(self, x: Tensor, kind: Literal["fp8", "int8"], scale: Tensor | None) -> Tensor:
        """The product of codes: x rounded with a scale for each row (each 128 columns where the weight has blocks), or `scale`."""
        width = 128 if self.scheme.block is not None else None
        rows, scales = input_codes(x.reshape(-1, self.in_features), kind, group_size=width, scale=scale)
        if self._wide is None or self._wide.device != x.device:
            held = self._scales(slice(None))
            held = held[:, 0] if width is None else held[::128]
            self._wide = held.float().contiguous()
        out = fp8_linear(rows, scales, self._codes(slice(None)), self._wide, self.bias, dtype=x.dtype, fast=True)
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b."""
        tile = max(1, TILE_VALUES.get(x.device.type, 1 << 20) // self.in_features)
        if tile >= self.out_features:
            return F.linear(x, self._tile(slice(None), x.dtype), bias)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        for start in range(0, self.out_features, tile):
            piece = slice(start, min(start + tile, self.out_features))
            out[..., piece] = F.linear(x, self._tile(piece, x.dtype))
        return out if bias is None else out.add_(bias)

    def extra_repr(self) -> str:
        scheme = self.scheme
        return f"{self.in_features}, {self.out_features}, {scheme.number}, bits={scheme.bits}, {scheme.strategy}"

    def _tile(self, piece: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of rows `piece`."""
        points = None if self.zero_points is None else self.zero_points[piece]
        scales = scale_values(self._scales(piece), None if self.global_scales is None else self.global_scales[piece])
        return dequantize(self._codes(piece), scales, points, self.width, dtype, self.scheme.number, self.index)

    def _scales(self, piece: slice | Tensor) -> Tensor:
        """Scales of rows `piece` in their own dtype; in memory those of one byte are bytes, which `.to(dtype)` leaves alone."""
        scales, kind = self.scales[piece], BYTE_SCALES.get(self.scheme.scales)
        return scales if kind is None else scales.view(kind)

    def _codes(self, piece: slice | Tensor) -> Tensor:
        """Codes of rows `piece`, one a byte."""
        codes = self.codes[piece]
        if self.pairs:
            return unpack_pairs(codes, self.pairs)
        if self.packed:
            return formats.unpack(codes, self.scheme.bits, self.in_features)
        return codes.view(self.scheme.code_dtype)

    def _by_row(self, values: Tensor | None, stored: Stored) -> Tensor:
        """Scales or zero points of a module, one set per row."""
        assert values is not None, "an asymmetric scheme without zero points"
        return self.scheme.by_row(values, *stored.codes.shape)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _same(indices: list[Tensor | None]) -> Tensor | None:
    """The one index of all modules. Raises ArtifactError when they differ."""
    first = indices[0]
    for other in indices[1:]:
        if (first is None) != (other is None) or (first is not None and not torch.equal(first, other)):
            raise ArtifactError(
                "the modules of one fused linear assign columns to groups (g_idx) differently",
                fix="quantize with desc_act=false, or from one Hessian for q, k and v and for gate and up",
            )
    return first
