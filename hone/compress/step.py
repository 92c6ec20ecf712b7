"""Steps of a compression: the phase in which each works, what it needs and gives, what it stores, and what computes that.

The engine runs the phases in order and knows no step by name:

1. model: each step rewrites the checkpoint that later steps read (`reshape` says its config, `passes` what that measures).
2. Then a decoder layer at a time, with statistics of its inputs:
   - layer: each step changes the layer's weights together (`change`), which still computes the same;
   - matrix: each linear passes through all steps of the phase (`apply`); one that `stores` says what is written
     (`entries` in advance, `tensors_of` a solved matrix) and all of them build what computes it (`module`);
   - cache: each step makes scales of what was observed of the layer's cache (`scales`), with which the layer rounds it (`use`).

`check_phases` checks the order in which a user gives them.

Shapes: N output features (rows), K input features (columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from hone.base.plan import check_order
from hone.base.table import Technique
from hone.compress.targets import EMBEDDED, matrix_name
from hone.cost.work import Work

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from hone.base.artifact import Draft
    from hone.base.figure import Estimate
    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.compress.matrix import Matrix, Parts
    from hone.compress.targets import Linear
    from hone.cost.compress.compression import Passes
    from hone.model.config import ModelConfig
    from hone.model.quantized.scheme import CacheScheme, Scheme
    from hone.model.weights.model import ModelSource

Phase = Literal["model", "layer", "matrix", "cache"]
PHASES: tuple[Phase, ...] = ("model", "layer", "matrix", "cache")
"""The order of the engine."""

Targets = tuple[tuple["Linear", ...], ...]
"""The linears to compress by layer, the head after the last."""
Ranges = tuple[list[dict[str, "Tensor"]], list[dict[str, "Tensor"]]]
"""Statistics of a layer's keys and of its values by name: one set for each KV head, or one for all."""
Entries = dict[str, tuple[Any, tuple[int, ...]]]
"""Torch dtype and shape of tensors by name."""


class Step(Technique):
    """A technique of one phase; by default it works on one matrix at a time, and a subclass writes `apply`.

    `needs` may also name statistics of the calibration inputs ("hessian", "absmax" ...): the engine then computes them from
    the calibration data and fills `Matrix.statistics`.
    """

    phase: ClassVar[Phase] = "matrix"
    needs: ClassVar[frozenset[str]] = frozenset({"weights:float"})
    targeted: ClassVar[bool] = True
    """Whether it works on the linears that the stage's `targets` name."""
    reshapes: ClassVar[bool] = False
    """Whether it changes the shapes of matrices, so that no layer can be compared with the given model's."""
    converts: ClassVar[bool] = False
    """Whether it changes what decoding keeps of each token."""
    stores: ClassVar[bool] = False
    """Whether it determines how a matrix is stored: `entries`, `method` and `tensors_of` are its own then."""

    def check_place(self, before: Sequence[Step], after: Sequence[Step]) -> None:
        """Raises ValueError where it cannot stand after the steps `before` and before those `after`."""
        late = [one for one in before if _rank(one) > _rank(self) and (one.targeted or self.reshapes)]
        if late:
            raise ValueError(self.too_late(late[-1]))

    def too_late(self, other: Step) -> str:
        """What is wrong where it comes after `other`, a step of a later phase."""
        return f"{self.kind} comes after {other.kind}: it works on a {self.phase}"

    def check_model(self, config: ModelConfig) -> None:
        """Raises SpecError when the step cannot work on the given model."""

    def check(self, name: str, rows: int, columns: int) -> None:
        """Raises SpecError when the step cannot work on a matrix of this shape."""

    def check_linear(self, name: str, linear: Linear) -> None:
        """Raises SpecError when the step cannot work on the matrix `name` or on one of its checkpoint modules."""
        self.check(name, linear.rows, linear.columns)

    @property
    def note(self) -> str:
        """What a user of the compressed model must know of these options; empty for nothing."""
        return ""

    def figures(self) -> dict[str, Estimate]:
        """Figures of the compressed model that follow from the step's options alone."""
        return {}

    @property
    def stands_alone(self) -> str:
        """Why no transform may follow, as a predicate; empty where one may."""
        return ""

    @property
    def multiplies_inputs(self) -> bool:
        """Whether the model multiplies inputs of linears by Hadamard matrices at run time."""
        return False

    @property
    def prunes(self) -> bool:
        """Whether it sets weights to zero."""
        return False

    @property
    def reads_inputs(self) -> bool:
        """Whether it reads calibration inputs besides the statistics in `needs`."""
        return False

    @property
    def checked_against(self) -> str:
        """What it changes in the model that the result is compared with; empty for nothing."""
        return ""

    # A matrix

    def of_matrix(self, names: Sequence[str]) -> Self:
        """The step for the matrix of checkpoint modules `names`, which may have options of its own."""
        return self

    def of_embedding(self) -> Step:
        """The step for an embedding."""
        return self

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

    def finish(self, matrix: Matrix) -> None:
        """Adds to `matrix` what is left when all steps were applied."""

    def work(self, rows: int, columns: int) -> Work:
        """The work of `apply`; by default a few passes over the matrix."""
        return Work(num_bytes=40.0 * rows * columns, num_ops=20)

    @property
    def input_statistics(self) -> frozenset[str]:
        """Statistics of the calibration inputs, in the layer as the phase "layer" leaves it, that `finish` reads."""
        return frozenset()

    def scheme(self, columns: int) -> Scheme | None:
        """The storage scheme of a matrix of `columns` input features, where the step stores codes."""
        return None

    def entries(self, rows: int, columns: int, dtype: Any) -> Entries:
        """Dtype and shape of each tensor of a module [rows, columns], by suffix, for a checkpoint of `dtype`."""
        raise NotImplementedError

    def method(self, columns: int) -> str:
        """`quant_method` of config.json for a matrix of `columns` input features: the library whose format it is."""
        raise NotImplementedError

    def tensors_of(self, matrix: Matrix, number: int, rows: slice) -> dict[str, Tensor]:
        """The tensors of `entries` of the checkpoint module `number` of a solved matrix, its rows `rows`, by suffix."""
        raise NotImplementedError

    def module(self, dense: nn.Module, parts: Parts) -> nn.Module:
        """The module that computes what is written of a linear, made of `dense`, which the steps before made."""
        return dense

    def quantization(self, unchanged: Sequence[str]) -> dict[str, Any] | None:
        """config.json's quantization_config where it follows from no schemes; `unchanged`: the modules that stay as they are."""
        return None

    def config_options(self, dtype: str) -> dict[str, Any]:
        """Keys of config.json's quantization_config beside the storage, for a checkpoint of `dtype`."""
        return {}

    # Beside the matrices

    def beside(self, matrix: Matrix, names: Sequence[str]) -> dict[str, Tensor]:
        """What is written of a solved matrix of modules `names` beside its tensors, by key of a PEFT adapter."""
        return {}

    def planned(self, config: ModelConfig, targets: Targets, dtype: torch.dtype) -> tuple[ModelConfig, int]:
        """`config` of the model with what is written beside it, and the bytes of that, for a checkpoint of `dtype`."""
        return config, 0

    def conclude(self, draft: Draft, config: ModelConfig, targets: Targets) -> None:
        """Writes what lies beside the model's shards, when all layers are done."""

    def config_values(self) -> dict[str, Any]:
        """Keys of config.json that say what is written beside the matrices."""
        return {}


class ModelStep(Step):
    """A step that rewrites the whole checkpoint before any layer is read; a subclass writes `reshape` and `rewrite`."""

    phase: ClassVar[Phase] = "model"

    def reshape(self, config: ModelConfig) -> ModelConfig:
        """The config of the result. Raises SpecError when the step cannot make such a model from one of `config`."""
        raise NotImplementedError

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        """The checkpoint that it leaves, and what the artifact says about it.

        `flow` is None without calibration. What was measured is kept at `state`, so that an interrupted run reads it there.
        """
        raise NotImplementedError

    def passes(self, config: ModelConfig) -> Passes | None:
        """The passes over the calibration inputs by which `rewrite` measures; None if it needs no such inputs."""
        return None

    def hadamards(self, config: ModelConfig, targets: Targets) -> dict[str, int]:
        """Sizes of the Hadamard matrices by which it multiplies inputs at run time, by the linear's name."""
        return {}

    @property
    def ends_bytes(self) -> float:
        """Bytes moved for each weight of the embedding and the head whenever they are read."""
        return 0.0


class CacheStep(Step):
    """A step that calibrates what the caches of layers hold; a subclass writes every method."""

    phase: ClassVar[Phase] = "cache"
    targeted: ClassVar[bool] = False

    def check_place(self, before: Sequence[Step], after: Sequence[Step]) -> None:
        if any(one.phase == "cache" for one in before):
            raise ValueError(f"{self.kind} is given twice: a cache has one set of scales")

    @property
    def reads_inputs(self) -> bool:
        return True

    @property
    def cache_scheme(self) -> CacheScheme:
        """The rounding of the cache."""
        raise NotImplementedError

    def check_cache(self, config: ModelConfig, method: str, *, calibrated: bool) -> None:
        """Raises SpecError for a model whose cache it cannot calibrate, or weights of the library `method` that cannot hold scales."""
        raise NotImplementedError

    def cache_entries(self, config: ModelConfig, dtype: Any) -> Entries:
        """Dtype and shape of every tensor that the step adds, by checkpoint name."""
        raise NotImplementedError

    def range_bytes(self, config: ModelConfig) -> float:
        """Bytes moved for each calibration token and layer by its statistics."""
        raise NotImplementedError

    @property
    def cache_statistics(self) -> frozenset[str]:
        """Statistics of a layer's keys and values that `scales` reads."""
        raise NotImplementedError

    def scales(
        self, ranges: Ranges, config: ModelConfig, index: int, stored: torch.dtype, computed: torch.dtype
    ) -> dict[str, Tensor]:
        """The scales of layer `index`, by checkpoint name, in dtype `stored`; `ranges` are the statistics of its keys and values, which
        were `computed` in that dtype by the weights that are written."""
        raise NotImplementedError

    def use(self, layer: nn.Module, config: ModelConfig, index: int, stored: dict[str, Tensor]) -> None:
        """Lets `layer` round its cache with the scales in `stored`, by checkpoint name."""
        raise NotImplementedError


def _rank(step: Step) -> tuple[int, bool]:
    """Its place in the order of the engine: steps that change shapes come before others of their phase."""
    return PHASES.index(step.phase), not step.reshapes


def check_phases(steps: Sequence[Step]) -> None:
    """Raises ValueError or SpecError for steps in an order in which they cannot work.

    Each says what it cannot follow, those of matrices first, for they know best what ends a matrix; between them the properties that
    steps need, give and take are followed.
    """
    for phase in ("matrix", None, "model", "cache", "layer"):
        if phase is None:
            check_order(steps, frozenset({"weights:float"}).union(*(step.needs for step in steps)), {})
        for place, step in enumerate(steps):
            if step.phase == phase:
                step.check_place(steps[:place], steps[place + 1 :])


def storing(steps: Iterable[Step]) -> Step | None:
    """The step that determines how weights are stored; None where they stay as they are."""
    return next((step for step in steps if step.stores), None)


def giving(wanted: str, steps: Iterable[Step]) -> Step | None:
    """The first step that gives `wanted`; None without one."""
    return next((step for step in steps if wanted in step.gives), None)


@dataclass(frozen=True)
class Assigned:
    """The storage of each matrix: `template` with the options that it has for the matrix, or with the bits that an allocation
    gave it by its name."""

    template: Step | None
    bits: Mapping[str, int] = field(default_factory=dict)

    def of(self, index: int, linear: Linear) -> Step | None:
        """The step that stores a linear of layer `index`; None where it stays as it is."""
        if self.template is None:
            return None
        bits = self.bits.get(matrix_name(index, linear.path))
        if bits is not None:
            return self.template.model_copy(update={"bits": bits})
        own = self.template.of_matrix([name for name, _ in linear.modules])
        return own.of_embedding() if linear.path == EMBEDDED else own

    def scheme(self, index: int, linear: Linear) -> Scheme:
        """The storage scheme of a linear of layer `index`, which is stored as codes."""
        step = self.of(index, linear)
        scheme = None if step is None else step.scheme(linear.columns)
        assert scheme is not None, f"{linear.path} is not stored as codes"
        return scheme
