"""A weight matrix on its way through the steps, and what is written of one linear, from which modules are made.

Shapes: N output features (rows; q, k, v stacked count as one matrix), K input features, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hone.compress.statistics import LEAST_TOKENS
from hone.compress.targets import Linear
from hone.model.config import ModelConfig
from hone.model.quantized import layouts
from hone.model.quantized.hadamard import input_hadamard, multiply_inputs
from hone.model.quantized.rounded_inputs import RoundedInputs
from hone.model.quantized.scheme import Scheme, Stored

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
    stored_dtype: torch.dtype
    """Dtype of the checkpoint, in which a weight that is not quantized is written."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    modules: tuple[int, ...] = ()
    """Rows of each checkpoint module in the stack: q, k and v."""
    model: dict[str, float] = field(default_factory=dict)
    """What `Step.prepare` found over all matrices of the model."""
    keep: Tensor | None = None
    stored: Stored | None = None
    quantize: Callable[[Matrix], None] | None = None
    """The `apply` of the step that stores it, for a step that quantizes again."""
    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(A [r, K], B [rows, r]) of each checkpoint module, as they are written."""
    replaced: bool = False
    notes: list[str] = field(default_factory=list)
    tokens: int | None = None
    """Of an expert the calibration tokens that it saw; with fewer than `LEAST_TOKENS` its `statistics` say nothing about inputs."""
    current: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.original

    @property
    def seldom(self) -> bool:
        """Whether it is the matrix of an expert that saw too few calibration tokens."""
        return self.tokens is not None and self.tokens < LEAST_TOKENS

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
        if hessian is not None and not self.seldom:
            lost = ((change @ hessian) * change).sum()
            whole = ((self.original @ hessian) * self.original).sum()
            output = _ratio(lost.clamp(min=0).sqrt(), whole.clamp(min=0).sqrt())
        base = self.base if self.factors else weight
        zeros = weight.numel() - int(torch.count_nonzero(base))
        return Errors(_ratio(change.norm(), self.original.norm()), output, zeros)

    def row(self, modules: Sequence[str], kinds: Iterable[str]) -> dict[str, Any]:
        """What the steps called `kinds` made of it and its errors: a row of layers.jsonl."""
        errors, scheme = self.errors(), None if self.stored is None else self.stored.scheme
        return {
            "name": self.name,
            "modules": list(modules),
            "kind": "+".join(kinds),
            "bits": 8 * self.stored_dtype.itemsize if scheme is None else scheme.bits,
            "group_size": 0 if scheme is None else scheme.group_size,
            "error": errors.output,
            "weight_error": errors.weight,
            "zeros": errors.zeros,
            "weights": self.original.numel(),
            "notes": self.notes,
            **({} if self.tokens is None else {"tokens": self.tokens}),
        }


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if float(whole) > 0 else 0.0


@dataclass(frozen=True)
class Parts:
    """What is written of one linear of layer `index`: `tensors` by checkpoint name, of which `Step.module` makes a module."""

    linear: Linear
    index: int
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    device: str
    dtype: torch.dtype
    """Dtype of the forward passes."""
    wide: torch.dtype
    """Dtype in which codes are dequantized."""
    weight: Tensor | None = None
    """The weight [N, K] that they hold, where it is known."""

    def modules(self) -> list[dict[str, Tensor]]:
        """The tensors of each checkpoint module by suffix, on the engine's device."""
        found = []
        for name, _ in self.linear.modules:
            given = ((key, value) for key, value in self.tensors.items() if key.startswith(f"{name}."))
            found.append({key.removeprefix(f"{name}."): value.to(self.device) for key, value in given})
        return found

    def unquantized(self, dense: nn.Module) -> nn.Module:
        """`dense` with the weight that is stored as it is."""
        weight = self.weight
        if weight is None:
            weight = torch.cat([part["weight"] for part in self.modules()])
        dense.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        return dense

    def dequantized(self, dense: nn.Module, scheme: Scheme) -> nn.Module:
        """`dense` with the weight that the stored codes mean."""
        weight = self.weight
        if weight is None:
            columns = self.linear.columns
            weight = torch.cat([layouts.read(scheme, part, columns).weight(self.wide) for part in self.modules()])
        dense.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        return dense

    def rounding(self, dense: nn.Module, scheme: Scheme) -> nn.Module:
        """A linear of the stored codes that rounds its inputs, in place of `dense`."""
        with torch.device("meta"):
            rounded = RoundedInputs(self.linear.columns, self.linear.rows, False, scheme=scheme)
        rounded.load(self.modules())
        rounded.bias = None if dense.bias is None else dense.bias.detach()
        return multiply_inputs(rounded, input_hadamard(dense))


def notes_said(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The notes in rows of layers.jsonl, each once with the matrices that have it."""
    noted: dict[str, list[str]] = {}
    for row in rows:
        for note in row["notes"]:
            noted.setdefault(note, []).append(row["name"])
    for note, names in noted.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {note}"
