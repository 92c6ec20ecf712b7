"""Integer quantizers: bits, groups of columns that share a scale, how scales are found, and the layouts that store them.

Shapes: N output features (rows), K input features, G groups of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hone.base.errors import SpecError
from hone.compress.quantizers import rules as ruled
from hone.compress.quantizers.base import Quantizer
from hone.cost.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.matrix import Matrix
    from hone.compress.targets import Linear
    from hone.model.quantized.scheme import Scheme
    from hone.ops.rounding.integer_grid import Grid


SCALES_TRIED = 21
"""Sizes of the grid that a search tries, of a symmetric one with both signs (`hone.ops.rounding.integer_grid.SHRINK`)."""
_FLOAT16_SCALES = ("gptq", "gptq_v2", "awq")
"""Layouts whose scales are float16 whatever the checkpoint's dtype is."""
_NOT_OF_EMBEDDINGS = ("kind", "activations", "observer", "rules")
"""Options that rounding an embedding does not take over."""


class IntegerQuantizer(Quantizer):
    """Base of the integer quantizers: bits, groups of columns that share a scale, and how scales are found."""

    may_have_no_groups: ClassVar[bool] = True
    """Whether group_size 0 is a choice."""
    any_bits: ClassVar[str] = "layout=pack-quantized"
    """The way out where a layout stores some numbers of bits alone."""

    bits: int = Field(4, ge=2, le=8, description="Bits per weight.")
    group_size: int = Field(128, ge=0, description="Columns that share a scale; 0 for one scale per row.")
    symmetric: bool = Field(
        True, description="Grids around zero; false adds a zero point to each scale, which few libraries load."
    )
    scale: Literal["absmax", "signed", "search"] = Field(
        "search",
        description="absmax: textbook; signed: full range, scale may be negative; search: least squared error.",
    )
    uneven: Literal["error", "nearest"] = Field(
        "error", description="Where group_size does not divide a matrix's columns: an error, or the nearest divisor."
    )
    layout: Literal["auto", "pack-quantized", "int-quantized", "gptq", "gptq_v2", "awq"] = Field(
        "auto",
        description="Storage format: compressed-tensors' two (auto: int-quantized for 8 bits with one scale per row where inputs are "
        "rounded too, else pack-quantized), GPTQModel's two, AutoAWQ's GEMM (4 bits).",
    )
    rules: tuple[ruled.Rule, ...] = Field(
        (),
        description="Bits and group_size of some matrices, as [{match: 're:.*down_proj', bits: 8}]: the first rule whose pattern "
        "matches a name holds, the others have the quantizer's.",
    )

    @model_validator(mode="after")
    def _one_sign(self) -> IntegerQuantizer:
        if not self.symmetric and self.scale == "signed":
            raise ValueError("scale signed is for symmetric grids: with zero points use absmax or search")
        return self

    @property
    def note(self) -> str:
        if self.symmetric or self.stored_layout != "pack-quantized":
            return ""
        return (
            "zero points: transformers with compressed-tensors 0.20 loads this model only with "
            "CompressedTensorsConfig(dequantize=True); symmetric=true loads everywhere"
        )

    def of_matrix(self, names: Sequence[str]) -> Self:
        options = ruled.options_of(self.rules, names[0]) if self.rules else {}
        return self.model_copy(update={**options, "rules": ()}) if options else self

    def of_embedding(self) -> Quantizer:
        """As the base; a solver that pushes errors onto other columns, for which inputs must mix them, becomes rounding to its grid."""
        if "hessian" not in self.needs:
            return super().of_embedding()
        options = {
            name: getattr(self, name) for name in IntegerQuantizer.model_fields if name not in _NOT_OF_EMBEDDINGS
        }
        return IntegerQuantizer(kind="rtn", **options)

    def check_targets(self, targets: Iterable[Iterable[Linear]]) -> None:
        ruled.check(self.rules, targets)

    def lines(self, targets: Iterable[Iterable[Linear]]) -> tuple[str, ...]:
        return ruled.lines(self.rules, targets)

    def nearest(self, weights: Tensor) -> Tensor:
        """As the base; scales are not searched."""
        from hone.ops.rounding.integer_grid import find_grid

        how = self.scale if self.scale != "search" else "signed" if self.symmetric else "absmax"
        scheme = self.scheme(weights.shape[1])
        dtype = self.as_dtype("float32")
        found = find_grid(weights, self.bits, scheme.group_size, how, dtype, symmetric=self.symmetric)
        return scheme.quantize(weights, *found).weight(weights.dtype)

    def scheme(self, columns: int) -> Scheme:
        from hone.model.quantized.scheme import Scheme

        groups = self.groups_of(columns)
        return Scheme(self.bits, groups, self.stored_layout, symmetric=self.symmetric, activations=self.rounding)

    def apply(self, matrix: Matrix) -> None:
        """Rounds every weight to the nearest point of its group's grid; a solver does better."""
        scheme = self.scheme(matrix.original.shape[1])
        matrix.stored = scheme.quantize(matrix.weight, *self.find_grid(matrix))

    def find_grid(self, matrix: Matrix, weights: Tensor | None = None) -> Grid:
        """The grid of `weights` (None: the current ones), as the option `scale` says; a search heeds H's diagonal if known."""
        from hone.ops.rounding.integer_grid import find_grid, find_scales

        hessian, size = matrix.statistics.get("hessian"), self.groups_of(matrix.original.shape[1])
        wide = self.as_dtype("float32")
        dtype = self.scale_dtype_of(matrix, lambda: find_scales(matrix.original, self.bits, size, "absmax", wide))
        weights = matrix.weight if weights is None else weights
        importance = None if hessian is None else hessian.diagonal()
        return find_grid(weights, self.bits, size, self.scale, dtype, importance, symmetric=self.symmetric)

    def groups_of(self, columns: int) -> int:
        """The group size used for a matrix of `columns` input features."""
        if not self.group_size or columns % self.group_size == 0 or self.uneven == "error":
            return self.group_size
        divisors = [size for size in range(8, columns) if columns % size == 0]
        return min(divisors, key=lambda size: abs(math.log(size / self.group_size)), default=0)

    def stored_scale_dtype(self, checkpoint_dtype: Any) -> Any:
        return (
            self.as_dtype("float16") if self.layout in _FLOAT16_SCALES else super().stored_scale_dtype(checkpoint_dtype)
        )

    @property
    def stored_layout(self) -> str:
        if self.layout == "auto":
            # Engines read int-quantized as codes of both operands: vLLM refuses it where inputs are not rounded.
            both = self.rounding is not None and self.bits == 8 and not self.group_size
            return "int-quantized" if both else "pack-quantized"
        return self.layout

    def check(self, name: str, rows: int, columns: int) -> None:
        if self.stored_layout == "int-quantized" and (self.bits != 8 or self.group_size):
            raise SpecError(
                f"{self.kind}: layout int-quantized stores 8 bits with one scale per row, not {self.bits} bits "
                f"with group_size {self.group_size}",
                fix="set bits=8 and group_size=0, or layout=pack-quantized",
            )
        problem = self.problem(columns)
        if self.layout in _FLOAT16_SCALES and problem is not None:
            raise SpecError(
                f"{self.kind} asks for {problem}, at {name}",
                fix=f"set {self.any_bits}, which stores 2 to 8 bits, each matrix with its own",
            )
        if self.layout in _FLOAT16_SCALES and self.scale_dtype not in ("auto", "float16"):
            raise SpecError(
                f"{self.kind}: layout {self.layout} stores float16 scales, not {self.scale_dtype}",
                fix=f"set scale_dtype=auto, or {self.any_bits}",
            )
        if self.group_size and columns % self.group_size and self.uneven == "error":
            divisors = [str(size) for size in range(8, columns + 1) if columns % size == 0][-10:]
            divisors += ["0 for one scale per row"] * self.may_have_no_groups
            raise SpecError(
                f"{self.kind}: group_size {self.group_size} does not divide the {columns} input features of {name}",
                fix=f"use one of {', '.join(divisors)}, or uneven=nearest",
            )
        super().check(name, rows, columns)

    def work(self, rows: int, columns: int) -> Work:
        """Rounding, the search over scales if any, and packing: by bytes for 4 bits, code by code otherwise."""
        passes = 1 if self.scale != "search" else 40 if self.symmetric else 24
        packing = 0 if self.stored_layout == "int-quantized" else 48 if self.bits in (4, 8) else 140
        size, starts = rows * columns, passes * 12
        # A scale is tried in chunks that a CPU's cache holds; on a GPU each of its ten operations moves all of a chunk (`_error`).
        tried = 0 if self.scale != "search" else 1 + 2 * SCALES_TRIED if self.symmetric else SCALES_TRIED
        on_gpu = Work(num_bytes=(64.0 + tried * 80.0 + packing) * size, num_ops=starts)
        return Work(num_bytes=(passes * 22.0 + packing) * size, num_ops=starts, on_gpu=on_gpu)
