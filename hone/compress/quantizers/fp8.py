"""FP8: every weight to the nearest 8-bit float of its block, row or matrix, without calibration data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hone.base.errors import SpecError
from hone.compress.quantizers.base import INPUTS_SAID, Inputs, Quantizer

if TYPE_CHECKING:
    from hone.compress.matrix import Matrix
    from hone.model.quantized.scheme import Scheme
    from hone.ops.rounding.inputs import Activations


BLOCK = (128, 128)
"""Rows and columns of a block in DeepSeek-V3 and in the kernels of vLLM and transformers."""


class FP8(Quantizer):
    """Rounds every weight to e4m3, the largest of a block, row or matrix to 448. Micikevicius et al. 2022, arXiv:2209.05433."""

    paper: ClassVar[str] = "arXiv:2209.05433"
    without_blocks: ClassVar[str] = "use strategy=channel, one scale a row"

    strategy: Literal["tensor", "channel", "block"] = Field(
        "channel", description="Weights that share a scale: the matrix, a row, or a block of 128 x 128."
    )
    activations: Literal["auto", Inputs] = Field(
        "auto",
        description=f"{INPUTS_SAID} auto: fp8_token, of blocks fp8_group; none where layout fp8 leaves it to the engine.",
    )
    layout: Literal["auto", "float-quantized", "fp8"] = Field(
        "auto",
        description="Storage format: compressed-tensors' float-quantized, or fp8, which transformers loads without more (blocks "
        "only); auto is fp8 for blocks.",
    )

    @property
    def stored_layout(self) -> str:
        if self.layout == "auto":
            return "fp8" if self.strategy == "block" else "float-quantized"
        return self.layout

    @property
    def note(self) -> str:
        if self.rounding is not None or self.stored_layout == "fp8":
            return ""
        return (
            "weights alone: vLLM 0.24 has no kernel for them on GPUs with FP8 products (0.26 has, by humming-kernels); "
            "activations=auto loads in both"
        )

    @property
    def rounding(self) -> Activations | None:
        if self.activations != "auto":
            return super().rounding
        if self.stored_layout == "fp8":
            return None
        from hone.ops.rounding.inputs import ACTIVATIONS

        return ACTIVATIONS["fp8_group" if self.strategy == "block" else "fp8_token"]

    def scheme(self, columns: int) -> Scheme:
        from hone.model.quantized.scheme import Scheme

        block = BLOCK if self.strategy == "block" else None
        shared = self.strategy == "tensor"
        rounding = self.rounding if self.stored_layout == "float-quantized" else None
        return Scheme(8, layout=self.stored_layout, number="e4m3", block=block, per_tensor=shared, activations=rounding)

    def stored_scale_dtype(self, checkpoint_dtype: Any) -> Any:
        return self.as_dtype("float32") if self.stored_layout == "fp8" else super().stored_scale_dtype(checkpoint_dtype)

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.stored_layout == "fp8" and self.strategy != "block":
            raise SpecError(
                f"{self.kind}: layout fp8 stores blocks, not one scale per {self.strategy}",
                fix="set strategy=block, or layout=float-quantized",
            )
        if self.stored_layout == "fp8" and self.scale_dtype not in ("auto", "float32"):
            raise SpecError(
                f"{self.kind}: layout fp8 stores float32 scales, not {self.scale_dtype}", fix="set scale_dtype=auto"
            )
        super().check(name, rows, columns)

    def apply(self, matrix: Matrix) -> None:
        from hone.model.quantized.nearest import float_scales, nearest_floats

        weights = matrix.weight
        scheme = self.scheme(weights.shape[1])
        dtype = self.scale_dtype_of(matrix, lambda: float_scales(weights, scheme))
        matrix.stored = nearest_floats(weights, scheme, dtype)
