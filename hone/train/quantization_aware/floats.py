"""8- and 4-bit floats in quantization-aware training. Their scales come from the largest weights, so that none is clamped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.train.quantization_aware.base import FakeQuantizer

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.quantized.scheme import Scheme, Stored

BLOCK = 128
"""Rows and columns of a block."""


class Floats(FakeQuantizer):
    """Base of the floating formats: a subclass stores a weight."""

    def rounded(self, weight: Tensor, modules: Sequence[int]) -> Tensor:
        from hone.ops.rounding.straight_through import straight_through

        stored = self.stored(weight.detach().float(), weight.dtype, modules).weight(weight.dtype)
        return straight_through(weight, stored)

    def stored(self, weight: Tensor, dtype: Any, modules: Sequence[int]) -> Stored:
        """The float32 weight [N, K] of a model of `dtype` in codes and scales."""
        raise NotImplementedError


class FP8(Floats):
    """Weights of 8-bit floats (e4m3), as the quantizer fp8 stores them. Micikevicius et al. 2022, arXiv:2209.05433."""

    paper: ClassVar[str] = "arXiv:2209.05433"
    strategy: Literal["tensor", "channel", "block"] = Field(
        "channel", description="Weights that share a scale: the matrix, a row, or a block of 128 x 128."
    )

    @property
    def exported(self) -> dict[str, Any]:
        return {**super().exported, "strategy": self.strategy, "activations": self.activations}

    def problem(self, columns: int, modules: Sequence[int]) -> str | None:
        if self.strategy == "block" and any(rows % BLOCK for rows in modules[:-1]):
            return f"a block of {BLOCK} rows would be of two of its modules, which have {', '.join(map(str, modules))} rows"
        return None

    def stored(self, weight: Tensor, dtype: Any, modules: Sequence[int]) -> Stored:
        import torch

        from hone.model.quantized.nearest import all_held, float_scales, nearest_floats, scale_dtype
        from hone.model.quantized.scheme import Scheme

        blocks = self.strategy == "block"
        scheme = Scheme(
            8, layout="fp8" if blocks else "float-quantized", number="e4m3", block=(BLOCK, BLOCK) if blocks else None,
            per_tensor=self.strategy == "tensor",
        )  # fmt: skip
        kept = torch.float32 if blocks else scale_dtype(dtype)
        if kept == torch.float16 and not all_held(float_scales(weight, scheme), modules):
            kept = torch.bfloat16
        return nearest_floats(weight, scheme, kept)


class Groups(Floats):
    """Base of the microscaling formats; a subclass names the format."""

    bits: ClassVar[int]
    number: ClassVar[str]
    scales: ClassVar[str] = "e8m0"
    group_size: ClassVar[int] = 32
    layout: ClassVar[str]

    @property
    def exported(self) -> dict[str, Any]:
        return {**super().exported, "scale": "absmax"}

    def problem(self, columns: int, modules: Sequence[int]) -> str | None:
        if columns % self.group_size:
            return f"its groups of {self.group_size} do not divide {columns} input features"
        return None

    def scheme(self) -> Scheme:
        """How a weight is stored."""
        from hone.model.quantized.scheme import Scheme

        return Scheme(self.bits, self.group_size, self.layout, number=self.number, scales=self.scales)  # type: ignore[arg-type]

    def stored(self, weight: Tensor, dtype: Any, modules: Sequence[int]) -> Stored:
        from hone.model.quantized.nearest import nearest_in_groups

        return nearest_in_groups(weight, self.scheme())


class NVFP4(Groups):
    """Weights of 4-bit floats (e2m1), 16 columns to an 8-bit scale, as the quantizer nvfp4 stores them. NVIDIA 2026, arXiv:2601.20088."""

    paper: ClassVar[str] = "arXiv:2601.20088"
    bits: ClassVar[int] = 4
    number: ClassVar[str] = "e2m1"
    scales: ClassVar[str] = "e4m3"
    group_size: ClassVar[int] = 16
    layout: ClassVar[str] = "nvfp4-pack-quantized"


class MXFP4(Groups):
    """Weights of 4-bit floats (e2m1), 32 columns to a power of two, as the quantizer mxfp4 stores them. Rouhani et al. 2023, arXiv:2310.10537."""

    paper: ClassVar[str] = "arXiv:2310.10537"
    bits: ClassVar[int] = 4
    number: ClassVar[str] = "e2m1"
    layout: ClassVar[str] = "mxfp4-pack-quantized"


class MXFP8(Groups):
    """Weights of 8-bit floats (e4m3), 32 columns to a power of two, as the quantizer mxfp8 stores them. Rouhani et al. 2023, arXiv:2310.10537."""

    paper: ClassVar[str] = "arXiv:2310.10537"
    bits: ClassVar[int] = 8
    number: ClassVar[str] = "e4m3"
    layout: ClassVar[str] = "mxfp8-quantized"
