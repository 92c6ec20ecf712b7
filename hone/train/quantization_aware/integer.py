"""Integers of 2 to 8 bits in quantization-aware training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.train.quantization_aware.base import FakeQuantizer

if TYPE_CHECKING:
    from torch import Tensor


class Integer(FakeQuantizer):
    """Weights on the integer grids that the quantizer rtn stores, slope one but where a grid ends. Liu et al. 2023, arXiv:2305.17888."""

    paper: ClassVar[str] = "arXiv:2305.17888"
    bits: int = Field(4, ge=2, le=8, description="Bits per weight.")
    group_size: int = Field(128, ge=0, description="Columns that share a scale; 0 for one scale per row.")
    symmetric: bool = Field(True, description="Grids around zero; false adds a zero point to each scale.")
    scale: Literal["absmax", "signed"] = Field(
        "absmax", description="absmax: textbook; signed: full range, scale may be negative."
    )

    @model_validator(mode="after")
    def _one_sign(self) -> Integer:
        if not self.symmetric and self.scale == "signed":
            raise ValueError("scale signed is for symmetric grids: with zero points use absmax")
        return self

    @property
    def exported(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("bits", "group_size", "symmetric", "scale")}
        return {**super().exported, "kind": "rtn", **options}

    def problem(self, columns: int, modules: Sequence[int]) -> str | None:
        if self.group_size and columns % self.group_size:
            return f"group_size {self.group_size} does not divide its {columns} input features"
        return None

    def rounded(self, weight: Tensor, modules: Sequence[int]) -> Tensor:
        import torch

        from hone.model.quantized.nearest import all_held, scale_dtype
        from hone.ops.rounding.integer_grid import find_grid, find_scales
        from hone.ops.rounding.straight_through import fake_quantize

        wide = weight.float()
        with torch.no_grad():
            dtype = scale_dtype(weight.dtype)
            given = (wide.detach(), self.bits, self.group_size)
            if dtype == torch.float16 and not all_held(find_scales(*given, "absmax", torch.float32), modules):
                dtype = torch.bfloat16  # as the exporter does
            grid = find_grid(*given, self.scale, dtype, symmetric=self.symmetric)
        return fake_quantize(wide, grid, self.bits).to(weight.dtype)
