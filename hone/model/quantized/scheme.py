"""A weight matrix as codes and scales: number format, bits, groups that share a scale.

Shapes: N output features (rows), K input features (columns), [R, G] the scales of one checkpoint module: R of its
blocks of rows by G of its blocks of columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hone.ops import formats
from hone.ops.rounding import numbers
from hone.ops.rounding.inputs import Activations
from hone.ops.rounding.numbers import Number, ScaleFormat, scale_values

Strategy = Literal["group", "tensor_group", "block", "channel", "tensor"]
BYTE_SCALES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
"""The dtype of scales of one byte."""


@dataclass(frozen=True)
class CacheScheme:
    """The rounding of keys (after the rotation) and values in a KV cache of 8 bits: scales per layer or per KV head, by calibration."""

    number: Literal["e4m3", "int"] = "e4m3"
    per: Literal["tensor", "head"] = "tensor"

    @property
    def rounding(self) -> Activations:
        """The rounding of the values that share a scale."""
        return Activations(8, self.number, dynamic=False, per="tensor")


@dataclass(frozen=True)
class Scheme:
    """The storage format of one linear. One scale is shared by `group_size` columns of a row, or by a `block` of (rows,
    columns), or by the whole tensor (`per_tensor`), or else by a row (channel). Asymmetric codes have a zero point
    beside each scale.
    """

    bits: int
    group_size: int = 0
    layout: str = "pack-quantized"
    """A name of `hone.model.quantized.layouts.LAYOUTS`."""
    number: Number = "int"
    block: tuple[int, int] | None = None
    per_tensor: bool = False
    symmetric: bool = True
    activations: Activations | None = None
    permuted: bool = False
    """Whether a tensor says which group each column belongs to (GPTQ's desc_act); else groups are runs of neighbours."""
    scales: ScaleFormat = "float"

    @property
    def strategy(self) -> Strategy:
        """The compressed-tensors name of the group that shares a scale."""
        if self.block is not None:
            return "block"
        if self.scales == "e4m3":
            return "tensor_group"
        return "tensor" if self.per_tensor else "group" if self.group_size else "channel"

    @property
    def product_of_codes(self) -> str:
        """How a GPU with such products multiplies the codes of 8 bits by inputs of 8 bits: "rowwise", "blockwise"; "": it widens them."""
        inputs = self.activations
        if inputs is None or {self.bits, inputs.bits} != {8} or self.number != inputs.number:
            return ""
        return "blockwise" if self.block == (128, 128) else "rowwise"

    @property
    def described(self) -> str:
        """The combination in words, for errors."""
        sign = "symmetric" if self.symmetric else "asymmetric"
        return f"{sign} {self.number} weights of {self.bits} bits, strategy {self.strategy}, in {self.layout}"

    def num_groups(self, in_features: int) -> int:
        """Scales of one row."""
        return self.grid(1, in_features)[1]

    def grid(self, rows: int, in_features: int) -> tuple[int, int]:
        """(R, G): how many scales one checkpoint module [rows, in_features] has."""
        high, wide = self.extent(rows, in_features)
        return -(-rows // high), -(-in_features // wide)

    def extent(self, rows: int, in_features: int) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        if self.block is not None:
            return self.block
        return (max(rows, 1) if self.per_tensor else 1), self.group_size or max(in_features, 1)

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of one unpacked code."""
        return numbers.code_dtype(self.number)

    def by_row(self, values: Tensor, rows: int, in_features: int) -> Tensor:
        """Scales or zero points of one checkpoint module, [R, G] or [1], expanded to one set per row, [N, G]."""
        high = self.extent(rows, in_features)[0]
        values = values.reshape(self.grid(rows, in_features))
        return values if high == 1 else values.repeat_interleave(high, 0)[:rows]

    def by_block(self, values: Tensor, in_features: int) -> Tensor:
        """The inverse of `by_row`: [R, G] from [N, G]."""
        return values[:: self.extent(len(values), in_features)[0]]

    def quantize(
        self, weights: Tensor, scales: Tensor, zero_points: Tensor | None = None, global_scale: Tensor | None = None
    ) -> Stored:
        """Weights [N, K] rounded to the nearest numbers of the grid of scales [R, G] (and zero points, or a global scale)."""
        rows, columns = weights.shape
        if self.number == "int" and zero_points is None and columns % scales.shape[-1] == 0:
            codes = formats.quantize(weights, self.by_row(scales, rows, columns), self.bits)
            return Stored(self, codes, scales)
        values = scale_values(scales, global_scale)
        steps = weights / self._per_column(values, rows, columns).to(weights.dtype)
        if isinstance(numbers.NUMBERS[self.number], numbers.Values):
            return Stored(self, numbers.nearest(steps, self.number), scales, global_scale=global_scale)
        if self.number != "int":
            largest = torch.finfo(self.code_dtype).max
            codes = steps.clamp_(-largest, largest).to(self.code_dtype)
            return Stored(self, codes, scales, global_scale=global_scale)
        if zero_points is not None:
            steps += self._per_column(zero_points, rows, columns)
        low, high = formats.code_range(self.bits)
        return Stored(self, steps.round_().clamp_(low, high).to(torch.int8), scales, zero_points)

    def _per_column(self, values: Tensor, rows: int, columns: int) -> Tensor:
        """[R, G] repeated to [N, K] (or [N, 1] where a row has one)."""
        return per_column(self.by_row(values, rows, columns), columns, self.extent(rows, columns)[1])


def per_column(values: Tensor, columns: int, width: int) -> Tensor:
    """Values [N, G], each repeated for its `width` columns: [N, K]; [N, 1] is returned unchanged."""
    return values if values.shape[1] == 1 else values.repeat_interleave(width, 1)[:, :columns]


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    width: int,
    dtype: torch.dtype,
    number: str = "int",
    index: Tensor | None = None,
) -> Tensor:
    """Weights [N, K] in `dtype` from codes [N, K] and scales and zero points [N, G], one for every `width` columns.

    `index` int [K] is the group of each column where groups are not runs of neighbours.

    The product is computed in `dtype`, as in compressed-tensors with scales of the model's dtype; with float32 scales in
    float32 and then rounded, as in bitsandbytes and in transformers' fp8.
    """
    columns = codes.shape[1]
    wide = torch.promote_types(scales.dtype, dtype) if scales.dtype == torch.float32 else dtype
    weights = numbers.decode(codes, number, wide)
    if index is not None:
        scales, width = scales[:, index], 1
        zero_points = None if zero_points is None else zero_points[:, index]
    if zero_points is None and columns == scales.shape[1] * width:
        weights = weights.view(len(codes), -1, width)
        return (weights * scales.to(wide).unsqueeze(-1)).view(codes.shape).to(dtype)
    if zero_points is not None:
        weights = weights - per_column(zero_points, columns, width).to(wide)
    return (weights * per_column(scales, columns, width).to(wide)).to(dtype)


@dataclass(frozen=True)
class Stored:
    """A weight [N, K] in its stored form: codes [N, K], scales [R, G] in the dtype they are stored in, zero points or None.

    The N rows may belong to several stacked checkpoint modules; no block of rows then spans two modules. `global_scale`
    float32 [1] divides the scales. `inputs` are the calibrated tensors of the rounding of inputs, by suffix.
    """

    scheme: Scheme
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    index: Tensor | None = None
    """int32 [K]: the group of each column; None where groups are runs of neighbours."""
    raw: Mapping[int, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors that the layout writes as they are, by the first row of their module in the stack."""
    global_scale: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight [N, K] in `dtype`."""
        rows, columns = self.codes.shape
        zero_points = self.zero_points
        if zero_points is not None:
            zero_points = self.scheme.by_row(zero_points, rows, columns)
        scales = self.scheme.by_row(scale_values(self.scales, self.global_scale), rows, columns)
        width = self.scheme.extent(rows, columns)[1]
        return dequantize(self.codes, scales, zero_points, width, dtype, self.scheme.number, self.index)

    def rows(self, rows: slice) -> Stored:
        """The module with rows `rows` of the stack."""
        total, columns = self.codes.shape
        high = self.scheme.extent(total, columns)[0]
        assert rows.start % high == 0 or self.scheme.per_tensor, f"{self.scheme} has blocks across two modules"
        blocks = slice(rows.start // high, -(-rows.stop // high))
        points = None if self.zero_points is None else self.zero_points[blocks].contiguous()
        codes, scales = self.codes[rows].contiguous(), self.scales[blocks].clone()  # one scale may serve two modules
        raw = {0: self.raw[rows.start]} if self.raw else {}
        return replace(self, codes=codes, scales=scales, zero_points=points, raw=raw)


class InputHadamard(NamedTuple):
    """Modules whose inputs are multiplied by Hadamard matrices of `size` columns (`hone.model.quantized.hadamard.multiply`)."""

    targets: tuple[str, ...]
    size: int
    """0: as many as the module has input features."""
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantization:
    """Which modules of a checkpoint are quantized and how.

    `groups` are (targets, scheme) in order; a target is a class, 'Linear' or 'Embedding', a module name, or 're:' and a pattern.
    """

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...] = ()
    method: str = "compressed-tensors"
    """`quant_method` of config.json: the library whose format it is."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json's block that concern computation or other libraries, not storage."""
    hadamards: tuple[InputHadamard, ...] = ()
    kv_cache: CacheScheme | None = None
    """The rounding of the KV cache, if it has scales."""

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of the linear or embedding named `module` in the checkpoint; None when it is not quantized."""
        if _targeted(self.ignore, module):
            return None
        for targets, scheme in self.groups:
            if _targeted(targets, module):
                return scheme
        return None

    def hadamard(self, module: str, columns: int) -> int:
        """Size of the Hadamard matrices with which inputs of the linear `module` are multiplied; 0 for none."""
        for one in self.hadamards:
            if _targeted(one.targets, module) and not _targeted(one.ignore, module):
                return one.size or columns
        return 0


def _targeted(targets: tuple[str, ...], module: str) -> bool:
    kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
    return any(target == kind or _matches(target, module) for target in targets)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module
