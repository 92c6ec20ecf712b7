"""Base of the quantizers: what codes and scales they store, the rounding of inputs beside it, and what computes with both.

Shapes: N output features (rows), K input features (columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.table import Choice
from hone.compress.observers import OBSERVERS
from hone.compress.observers.base import Observer
from hone.compress.observers.min_max import MinMax
from hone.compress.step import Entries, Step, giving
from hone.compress.targets import check_modules
from hone.cost.work import Work

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hone.compress.matrix import Matrix, Parts
    from hone.compress.targets import Linear
    from hone.model.quantized.scheme import Scheme
    from hone.ops.rounding.inputs import Activations

inputs = lazy("hone.ops.rounding.inputs")
layouts = lazy("hone.model.quantized.layouts")

RANGE_BYTES = {"extremes": 8.0, "histogram": 60.0, "gradients": 0.0}
"""Bytes a value at the rate of a large copy: counting takes 7 ns (two-core AMD EPYC)."""
_ROUNDING_BYTES = {"int": 24.0, "e4m3": 80.0, "e2m1": 130.0}
"""The same for rounding to a format."""


Inputs = Literal[
    "none",
    "int8_token",
    "int8_token_asymmetric",
    "int4_token",
    "int4_token_asymmetric",
    "int8_tensor",
    "int8_tensor_asymmetric",
    "fp8_token",
    "fp8_tensor",
    "fp8_group",
    "nvfp4",
    "mxfp4",
    "mxfp8",
]
INPUTS_SAID = (
    "Rounding of the linears' inputs, too. token: a scale each at run time; tensor: one, from calibration; "
    "nvfp4, mxfp4, mxfp8, fp8_group: groups of 16, 32, 32, 128 columns."
)


class Quantizer(Step):
    """A step that stores codes and scales: a subclass writes `scheme`, and `apply`, which sets `Matrix.stored`."""

    stores: ClassVar[bool] = True
    gives: ClassVar[frozenset[str]] = frozenset({"weights:quantized"})
    takes: ClassVar[frozenset[str]] = frozenset({"weights:float"})
    without_blocks: ClassVar[str] = "use a block height that divides them, groups, or one scale per row"
    """The options by which no scale is of rows of two modules."""

    scale_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the stored scales; auto is the checkpoint's, or float16 for a float32 checkpoint."
    )

    activations: Inputs = Field("none", description=INPUTS_SAID)
    observer: Annotated[Observer, Choice(OBSERVERS)] = Field(
        MinMax(kind="min_max"), description="Range of the inputs that scales from calibration represent."
    )

    def of_embedding(self) -> Quantizer:
        """The quantizer with these options of an embedding: its rows are looked up, so there are no inputs to round or to heed."""
        return self.model_copy(update={"activations": "none"})

    def check_targets(self, targets: Iterable[Iterable[Linear]]) -> None:
        """Raises SpecError when options of single matrices fit none of the linears `targets`, by layer."""

    def lines(self, targets: Iterable[Iterable[Linear]]) -> tuple[str, ...]:
        """Which matrices have options of their own, for the plan."""
        return ()

    def scheme(self, columns: int) -> Scheme:
        """The storage scheme of a matrix of `columns` input features; its `activations` are `rounding`."""
        raise NotImplementedError

    @property
    def rounding(self) -> Activations | None:
        """The rounding of inputs that the option `activations` names."""
        return inputs.ACTIVATIONS.get(self.activations)

    @property
    def input_statistics(self) -> frozenset[str]:
        """Statistics of the calibration inputs that scales of inputs need."""
        return self.observer.needs if inputs.tensors_of(self.rounding) else frozenset()

    @property
    def gradient_sequences(self) -> int:
        """Calibration sequences on which the scales of inputs need gradients of the loss; 0: none."""
        reads = "gradients" in self.observer.needs and self.input_statistics
        return self.observer.gradient_sequences if reads else 0

    @property
    def range_bytes(self) -> float:
        """Bytes moved for each value of a linear's input by `input_statistics`."""
        return sum(RANGE_BYTES[name] for name in self.input_statistics)

    @property
    def rounding_bytes(self) -> float:
        """Bytes moved for each value of a linear's input by rounding it."""
        return 0.0 if self.rounding is None else _ROUNDING_BYTES[self.rounding.number]

    @property
    def reads_inputs(self) -> bool:
        return bool(self.input_statistics)

    def finish(self, matrix: Matrix) -> None:
        """Adds the scales of inputs that come from calibration to `matrix.stored`."""
        if self.input_statistics and matrix.stored is not None:
            ends = self.observer.range(matrix.statistics, self.rounding)
            found = inputs.static_tensors(self.rounding, *ends)
            found = {suffix: tensor.to(matrix.original.device) for suffix, tensor in found.items()}
            matrix.stored = replace(matrix.stored, inputs=found)

    def stored_scale_dtype(self, checkpoint_dtype: Any) -> Any:
        """The torch dtype of the scales for a checkpoint of `checkpoint_dtype`."""
        if self.scale_dtype != "auto":
            return self.as_dtype(self.scale_dtype)
        from hone.model.quantized.nearest import scale_dtype

        return scale_dtype(checkpoint_dtype)

    @staticmethod
    def as_dtype(name: str) -> torch.dtype:
        """The torch dtype called `name`."""
        import torch

        return getattr(torch, name)

    def scale_dtype_of(self, matrix: Matrix, scales: Callable[[], Tensor]) -> Any:
        """The torch dtype of this matrix's scales, which are about those that `scales` computes.

        bfloat16, which has as many bytes, where float16 does not hold them and was not asked for. Raises SpecError where it was, or
        where the format has no other.
        """
        from hone.model.quantized.nearest import all_held

        dtype, half, wide = (
            self.stored_scale_dtype(matrix.stored_dtype),
            self.as_dtype("float16"),
            self.as_dtype("bfloat16"),
        )
        if dtype != half:
            return dtype
        if all_held(scales(), matrix.modules):
            return dtype
        if self.stored_scale_dtype(wide) == wide:
            matrix.notes.append("scales in bfloat16: float16 has no numbers as small or as large")
            return wide
        raise SpecError(
            f"{self.kind}: float16 cannot hold the scales of {matrix.name}, of which some are below {2.0**-20:.2g} or above 65504",
            fix="set scale_dtype=auto and a layout that stores other scales (pack-quantized), or leave this matrix out with ignore",
        )

    def entries(self, rows: int, columns: int, dtype: Any) -> Entries:
        return layouts.tensors_of(self.scheme(columns), rows, columns, self.stored_scale_dtype(dtype))

    def method(self, columns: int) -> str:
        return layouts.layout_of(self.scheme(columns)).method

    def tensors_of(self, matrix: Matrix, number: int, rows: slice) -> dict[str, Tensor]:
        assert matrix.stored is not None, f"{self.kind} stored nothing"
        return layouts.write(matrix.stored.rows(rows))

    def module(self, dense: nn.Module, parts: Parts) -> nn.Module:
        """`dense` with the dequantized weight, or a linear of the codes that rounds its inputs, too."""
        scheme = self.scheme(parts.linear.columns)
        return parts.dequantized(dense, scheme) if self.rounding is None else parts.rounding(dense, scheme)

    def check_linear(self, name: str, linear: Linear) -> None:
        super().check_linear(name, linear)
        check_modules(name, linear, self.scheme(linear.columns), self.without_blocks)

    def nearest(self, weights: Tensor) -> Tensor:
        """`weights` [N, K] rounded to the nearest points of this quantizer's grid, for searches that round many times.

        A quantizer that needs calibration inputs replaces this.
        """
        from hone.compress.matrix import Matrix

        matrix = Matrix("", weights, self.as_dtype("float32"))
        self.apply(matrix)
        return matrix.weight

    def problem(self, columns: int) -> str | None:
        """What no layout stores of a matrix of `columns` input features; None where one does."""
        return layouts.problem(self.scheme(columns))

    def check(self, name: str, rows: int, columns: int) -> None:
        problem = self.problem(columns)
        if problem is not None:
            raise SpecError(
                f"{self.kind} asks for {problem}, at {name}",
                fix="choose a format that hone stores, see: hone techniques",
            )
        super().check(name, rows, columns)
        if self.scheme(columns).activations != self.rounding:
            raise SpecError(
                f"{self.kind} stores no rounding of inputs, and activations is {self.activations}",
                fix="leave activations out, or use rtn, gptq or a float format",
            )
        size = 0 if self.rounding is None else self.rounding.group_size
        if size and columns % size:
            raise SpecError(
                f"{self.kind}: activations {self.activations} have groups of {size}, which do not divide the {columns} input "
                f"features of {name}",
                fix="use activations=fp8_token or int8_token, or leave this matrix out with ignore",
            )
        if size and self.input_statistics and not self.observer.grouped:
            raise SpecError(
                f"{self.kind}: observer {self.observer.kind} works on one scale for all inputs, and {self.activations} has "
                "one for each group",
                fix="use observer min_max, moving_average or percentile",
            )

    def work(self, rows: int, columns: int) -> Work:
        """Finding scales and rounding: a few passes."""
        return Work(num_bytes=32.0 * rows * columns, num_ops=12)


def quantizer_of(steps: Iterable[Step]) -> Quantizer | None:
    """The step that stores codes and scales; None without a quantizer."""
    return cast("Quantizer | None", giving("weights:quantized", steps))
