"""A weight matrix in the sequence of compression steps, and the base classes of steps.

Shapes: N output features (rows; q, k, v stacked count as one matrix), K input features, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.figure import Estimate
from hone.base.lazy import lazy
from hone.base.table import Choice, Technique
from hone.compress.observers import OBSERVERS
from hone.compress.observers.min_max import MinMax
from hone.compress.targets import EMBEDDED, HEAD
from hone.cost.compress import Work

if TYPE_CHECKING:
    from torch import Tensor

    from hone.compress.targets import Linear
    from hone.model.quantized.scheme import Scheme, Stored
    from hone.ops.rounding.inputs import Activations

torch = lazy("torch")
activations_of = lazy("hone.ops.rounding.inputs")
grid = lazy("hone.ops.rounding.integer_grid")
layouts = lazy("hone.model.quantized.layouts")
schemes = lazy("hone.model.quantized.scheme")


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


_ZEROS = 0.01
"""Share of exact zeros above which a weight was pruned; training leaves next to none."""


class Errors(NamedTuple):
    """Errors of a matrix: ||W' - W|| / ||W||, ||(W' - W) X|| / ||W X|| (None without calibration inputs X), zeros in W'."""

    weight: float
    output: float | None
    zeros: int


@dataclass
class Matrix:
    """A weight matrix and its state after the steps so far.

    `original` [N, K] is float32 or float64. A step replaces `current`, the float weight (never in place); a pruner also sets
    `keep` (bool [N, K]), False for weights that must stay zero; a quantizer sets `stored`, whose values are the weight from
    then on; a low-rank step sets `factors`, which replace the weight if `replaced`, else are added to it. `statistics` holds
    those of the calibration inputs that the steps need (see `hone.compress.statistics`).
    """

    name: str
    original: Tensor
    stored_dtype: Any
    """Dtype of the checkpoint, in which a weight that is not quantized is written."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    modules: tuple[int, ...] = ()
    """Rows of each checkpoint module in the stack: q, k and v."""
    model: dict[str, float] = field(default_factory=dict)
    """What `Step.prepare` found over all matrices of the model."""
    keep: Tensor | None = None
    stored: Stored | None = None
    quantizer: Quantizer | None = None
    """The quantizer among the steps, for a step that quantizes again."""
    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(A [r, K], B [rows, r]) of each checkpoint module, as they are written."""
    replaced: bool = False
    notes: list[str] = field(default_factory=list)
    current: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.original

    @property
    def weight(self) -> Tensor:
        """The current weight with its factors, dequantized if stored, [N, K] in the dtype of `original`."""
        return self.base + self.product() if self.factors and not self.replaced else self.base

    def product(self) -> Tensor:
        """The product of the factors, [N, K]."""
        return torch.cat([up.to(self.original) @ down.to(self.original) for down, up in self.factors])

    @property
    def base(self) -> Tensor:
        """The current weight without factors that are added to it."""
        if self.replaced:
            return self.product()
        if self.stored is not None:
            return self.stored.weight(self.original.dtype)
        return self.current if self.keep is None else self.current.masked_fill(~self.keep, 0)

    def keep_zeros(self, *, quantized: bool = False) -> None:
        """Zeros of a weight that was pruned before stay zero: more of them than training leaves.

        A weight that was `quantized` has zeros of its grid: there two of every four neighbours must be zero.
        """
        zeros = self.original == 0
        share = float(zeros.sum() / max(zeros.numel(), 1))
        if quantized:
            pairs = zeros.shape[1] % 4 == 0 and bool((zeros.view(len(zeros), -1, 4).sum(-1) >= 2).all())
            share = share if pairs else 0.0
        if _ZEROS < share < 1:
            self.prune(~zeros)
            self.notes.append("zeros of the given model stay zero")

    def prune(self, keep: Tensor) -> None:
        """Sets weights to zero where `keep` bool [N, K] is False; later steps keep them zero."""
        self.keep = keep if self.keep is None else self.keep & keep

    def errors(self) -> Errors:
        """The errors of `weight` against `original`: of the weight, and of its outputs on the calibration inputs; zeros in `base`."""
        weight = self.weight
        change = weight - self.original
        hessian, output = self.statistics.get("hessian"), None
        if hessian is not None:
            lost = ((change @ hessian) * change).sum()
            whole = ((self.original @ hessian) * self.original).sum()
            output = _ratio(lost.clamp(min=0).sqrt(), whole.clamp(min=0).sqrt())
        base = self.base if self.factors else weight
        zeros = weight.numel() - int(torch.count_nonzero(base))
        return Errors(_ratio(change.norm(), self.original.norm()), output, zeros)

    def row(self, modules: Sequence[str], steps: Iterable[Step]) -> dict[str, Any]:
        """What `steps` made of it and its errors: a row of layers.jsonl."""
        errors, scheme = self.errors(), None if self.stored is None else self.stored.scheme
        return {
            "name": self.name,
            "modules": list(modules),
            "kind": "+".join(step.kind for step in steps),
            "bits": 8 * self.stored_dtype.itemsize if scheme is None else scheme.bits,
            "group_size": 0 if scheme is None else scheme.group_size,
            "error": errors.output,
            "weight_error": errors.weight,
            "zeros": errors.zeros,
            "weights": self.original.numel(),
            "notes": self.notes,
        }


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if float(whole) > 0 else 0.0


class Step(Technique):
    """A technique that works on one matrix at a time; a subclass writes `apply`.

    `needs` may also name statistics of the calibration inputs ("hessian", "absmax" ...): the engine then computes them from
    the calibration data and fills `Matrix.statistics`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights:float"})

    def check(self, name: str, rows: int, columns: int) -> None:
        """Raises SpecError when the step cannot work on a matrix of this shape."""

    @property
    def reads_model(self) -> bool:
        """Whether `prepare` reads the given model: such a step must be the first."""
        return False

    def prepare(self, weights: Callable[[], Iterator[Tensor]]) -> dict[str, float]:
        """Numbers over all matrices of the given model, for `Matrix.model`; called once, before the first layer.

        Each call of `weights` reads the checkpoint again, one module [N, K] at a time. A resumed run calls `prepare`
        again, so the result must not depend on the order of sums.
        """
        raise NotImplementedError

    def apply(self, matrix: Matrix) -> None:
        """Changes `matrix` in place; must depend on nothing but `matrix`."""
        raise NotImplementedError

    def work(self, rows: int, columns: int) -> Work:
        """The work of `apply`; by default a few passes over the matrix."""
        return Work(num_bytes=40.0 * rows * columns, num_ops=20)

    def figures(self) -> dict[str, Estimate]:
        """Figures of the compressed model that follow from the step's options alone."""
        return {}

    @property
    def note(self) -> str:
        """What a user of the compressed model must know of these options; empty for nothing."""
        return ""


class Storage(Step):
    """A step that determines the storage of weights: a subclass writes `entries`."""

    def entries(self, rows: int, columns: int, dtype: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Dtype and shape of each tensor of a module [rows, columns], by suffix, for a checkpoint of `dtype`."""
        raise NotImplementedError

    def method(self, columns: int) -> str:
        """`quant_method` of config.json for a matrix of `columns` input features: the library whose format it is."""
        raise NotImplementedError


class Quantizer(Storage):
    """A step that stores codes and scales: a subclass writes `scheme`, and `apply`, which sets `Matrix.stored`."""

    gives: ClassVar[frozenset[str]] = frozenset({"weights:quantized"})
    takes: ClassVar[frozenset[str]] = frozenset({"weights:float"})

    scale_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of the stored scales; auto is the checkpoint's, or float16 for a float32 checkpoint."
    )

    activations: Inputs = Field("none", description=INPUTS_SAID)
    observer: Annotated[Technique, Choice(OBSERVERS)] = Field(
        MinMax(kind="min_max"), description="Range of the inputs that scales from calibration represent."
    )

    def of_matrix(self, names: Sequence[str]) -> Self:
        """The quantizer of the matrix of checkpoint modules `names`, which may have options of its own."""
        return self

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
        return activations_of.ACTIVATIONS.get(self.activations)

    @property
    def input_statistics(self) -> frozenset[str]:
        """Statistics of the calibration inputs that scales of inputs need."""
        return self.observer.needs if activations_of.tensors_of(self.rounding) else frozenset()

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

    def calibrate_inputs(self, matrix: Matrix) -> None:
        """Adds the scales of inputs that come from calibration to `matrix.stored`."""
        if self.input_statistics and matrix.stored is not None:
            ends = self.observer.range(matrix.statistics, self.rounding)
            found = activations_of.static_tensors(self.rounding, *ends)
            inputs = {suffix: tensor.to(matrix.original.device) for suffix, tensor in found.items()}
            matrix.stored = replace(matrix.stored, inputs=inputs)

    def stored_scale_dtype(self, checkpoint_dtype: Any) -> Any:
        """The torch dtype of the scales for a checkpoint of `checkpoint_dtype`."""
        if self.scale_dtype != "auto":
            return getattr(torch, self.scale_dtype)
        return torch.float16 if checkpoint_dtype == torch.float32 else checkpoint_dtype

    def scale_dtype_of(self, matrix: Matrix, scales: Callable[[], Tensor]) -> Any:
        """The torch dtype of this matrix's scales, which are about those that `scales` computes.

        bfloat16, which has as many bytes, where float16 does not hold them and was not asked for. Raises SpecError where it was, or
        where the format has no other.
        """
        dtype = self.stored_scale_dtype(matrix.stored_dtype)
        if dtype != torch.float16:
            return dtype
        found = scales()
        by_module = found.split(matrix.modules) if len(found) == sum(matrix.modules) else (found,)
        if all(grid.float16_holds(part) for part in by_module):
            return dtype
        if self.stored_scale_dtype(torch.bfloat16) == torch.bfloat16:
            matrix.notes.append("scales in bfloat16: float16 has no numbers as small or as large")
            return torch.bfloat16
        raise SpecError(
            f"{self.kind}: float16 cannot hold the scales of {matrix.name}, of which some are below {2.0**-20:.2g} or above 65504",
            fix="set scale_dtype=auto and a layout that stores other scales (pack-quantized), or leave this matrix out with ignore",
        )

    def entries(self, rows: int, columns: int, dtype: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
        return layouts.tensors_of(self.scheme(columns), rows, columns, self.stored_scale_dtype(dtype))

    def method(self, columns: int) -> str:
        return layouts.layout_of(self.scheme(columns)).method

    def config_options(self, dtype: str) -> dict[str, Any]:
        """Keys of config.json's quantization_config beside the storage, for a checkpoint of `dtype`."""
        return {}

    def nearest(self, weights: Tensor) -> Tensor:
        """`weights` [N, K] rounded to the nearest points of this quantizer's grid, for searches that round many times.

        A quantizer that needs calibration inputs replaces this.
        """
        matrix = Matrix("", weights, torch.float32)
        self.apply(matrix)
        return matrix.weight

    def check(self, name: str, rows: int, columns: int) -> None:
        problem = layouts.problem(self.scheme(columns))
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
    return next((step for step in steps if isinstance(step, Quantizer)), None)


def storage_of(steps: Iterable[Step]) -> Storage | None:
    """The step that determines the storage of weights; None where they stay as they are."""
    return next((step for step in steps if isinstance(step, Storage)), None)


@dataclass(frozen=True)
class Assigned:
    """The storage of each matrix: `template` with the options that it has for the matrix, or with the bits that an allocation
    gave it by its name."""

    template: Storage | None
    bits: Mapping[str, int] = field(default_factory=dict)

    def of(self, index: int, linear: Linear) -> Any:
        """The step that stores a linear of layer `index`."""
        if not isinstance(self.template, Quantizer):
            return self.template
        bits = self.bits.get(matrix_name(index, linear.path))
        if bits is not None:
            return self.template.model_copy(update={"bits": bits})
        own = self.template.of_matrix([name for name, _ in linear.modules])
        return own.of_embedding() if linear.path == EMBEDDED else own


def matrix_name(index: int, path: str) -> str:
    """Name of the linear at `path` of layer `index`: 'layers.3.mixer.qkv', or 'lm_head' of the head, after the last layer; that of
    the embedding, whatever the index, is 'embed_tokens'."""
    return path if path in (HEAD, EMBEDDED) else f"layers.{index}.{path}"


def notes_said(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The notes in rows of layers.jsonl, each once with the matrices that have it."""
    noted: dict[str, list[str]] = {}
    for row in rows:
        for note in row["notes"]:
            noted.setdefault(note, []).append(row["name"])
    for note, names in noted.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {note}"
