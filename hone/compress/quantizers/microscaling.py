"""MXFP4 and MXFP8: groups of 4- or 8-bit floats that share a power of two; and their base, which NVFP4 has, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.base import Quantizer
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix
    from hone.model.quantized.scheme import Scheme, Stored


ROUNDING_BYTES = {4: 150.0, 8: 60.0}
"""Bytes a weight, at the rate of a large copy, of dividing, rounding and comparing once, by bits."""


class Microscaling(Quantizer):
    """A quantizer of groups of floats; a subclass names the format, and writes `stored` where it is no MX format."""

    bits: ClassVar[int]
    number: ClassVar[str]
    group_size: ClassVar[int] = 32
    scales: ClassVar[str] = "e8m0"
    candidates: ClassVar[int] = 4
    """Scales that a search tries."""

    scale: Literal["absmax", "search"] = Field(
        "search",
        description="absmax: from the largest weight of a group; search: least squared error, weighted by calibration inputs.",
    )

    def scheme(self, columns: int) -> Scheme:
        from hone.model.quantized.scheme import Scheme

        return Scheme(
            self.bits,
            self.group_size,
            self.layout,  # type: ignore[attr-defined]  # of a subclass, some of which have two
            number=self.number,
            scales=self.scales,
            activations=self.rounding,
        )

    def apply(self, matrix: Matrix) -> None:
        hessian = matrix.statistics.get("hessian")
        matrix.stored = self.stored(matrix.weight, None if hessian is None else hessian.diagonal())

    def stored(self, weights: Tensor, importance: Tensor | None) -> Stored:
        """Weights [N, K] rounded, with scales weighted by `importance` [K]."""
        from hone.ops.rounding.float_grid import find_scales

        scales = find_scales(weights, self.number, self.group_size, self.scale, importance=importance)
        return self.scheme(weights.shape[1]).quantize(weights, scales)

    def nearest(self, weights: Tensor) -> Tensor:
        """As the base; scales are not searched."""
        plain = self.model_copy(update={"scale": "absmax"})
        return plain.stored(weights, None).weight(weights.dtype)

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.scale_dtype != "auto":
            raise SpecError(
                f"{self.kind}: scale_dtype is {self.scale_dtype}, and the format stores scales in one byte",
                fix="leave scale_dtype out",
            )
        if columns % self.group_size:
            raise SpecError(
                f"{self.kind}: its groups of {self.group_size} do not divide the {columns} input features of {name}",
                fix="leave this matrix out with ignore, or use rtn or gptq with uneven=nearest",
            )
        super().check(name, rows, columns)

    def work(self, rows: int, columns: int) -> Work:
        """Rounding once for every scale tried, and packing."""
        passes = 1 + (self.candidates if self.scale == "search" else 0)
        size = rows * columns
        on_gpu = Work(num_bytes=(passes * 64.0 + 48.0) * size, num_ops=passes * 15)
        return Work(num_bytes=(passes * ROUNDING_BYTES[self.bits] + 48.0) * size, num_ops=passes * 15, on_gpu=on_gpu)


class MXFP4(Microscaling):
    """Rounds to 4-bit floats (e2m1) with a power of two as the scale of 32 columns. Rouhani et al. 2023, arXiv:2310.10537."""

    paper: ClassVar[str] = "arXiv:2310.10537"
    bits: ClassVar[int] = 4
    number: ClassVar[str] = "e2m1"

    layout: Literal["mxfp4-pack-quantized", "mxfp4"] = Field(
        "mxfp4-pack-quantized",
        description="Storage format: that of compressed-tensors, or that of gpt-oss, whose experts of a layer are one tensor: of "
        "them alone, and of models of that family.",
    )


class MXFP8(Microscaling):
    """Rounds to 8-bit floats (e4m3) with a power of two as the scale of 32 columns. Rouhani et al. 2023, arXiv:2310.10537."""

    paper: ClassVar[str] = "arXiv:2310.10537"
    bits: ClassVar[int] = 8
    number: ClassVar[str] = "e4m3"
    layout: ClassVar[str] = "mxfp8-quantized"
