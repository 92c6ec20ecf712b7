"""The base of optimizers: groups of weights, each with a rule that turns gradients into a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from hone.base.table import Technique
from hone.cost.dims import ModelDims
from hone.cost.train.update import UpdateCost
from hone.parallel.cut import Cut
from hone.train.spikes.rewind import Rewind
from hone.train.spikes.skip_step import SkipStep

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Parameter:
    """What an optimizer knows of a trained weight.

    `kind`: a 'matrix' of a layer's linear (output rows first), the 'embedding' (also the head, when tied), the
    'head', or 'other' (norms, biases, a mixer's own parameters). `shape` is that of the whole weight, also where a
    tensor-parallel rank has a part of it; `pieces` are the row counts of the matrices that are fused into one, such as
    queries, keys and values.
    """

    kind: Literal["matrix", "embedding", "head", "other"]
    shape: tuple[int, ...]
    pieces: tuple[int, ...] = ()


class Part(Protocol):
    """A part of a weight on each of some ranks, which all call `join` and `add` in the same order."""

    @property
    def cut(self) -> Cut:
        """Which part this rank has."""

    def join(self, part: Tensor) -> Tensor:
        """The whole weight, from what every rank gives for its part."""

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole`."""

    def add(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in its place."""


@dataclass
class Entry:
    """One weight in a step: its float32 values, its gradient and its optimizer state. A step may change all three in place."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    parameter: Parameter
    part: Part | None = None
    """What makes a whole weight of the parts of tensor-parallel ranks; None: the weight is whole."""
    factor: Tensor | None = None
    """Of a rule that `fuses`: what the gradient, of any float dtype, is to be multiplied with, a float32 scalar on its device."""
    rounded: Tensor | None = None
    """Of a rule that `fuses`: where the new weight is wanted in half precision too."""


class Rule:
    """The update of weights from their gradients. It has numbers only: the state of a weight is an argument.

    The step of a weight does not depend on other weights, so a group may be updated in parts, in any order. Unless the rule
    `reads_whole` weights, the step of an element depends on its block of 256 alone: a weight may be a flat part of one.
    """

    reads_whole: ClassVar[bool] = False
    """Whether a step needs the whole weight in its shape."""
    elements_per_entry: ClassVar[Mapping[str, int]] = {}
    """Of how many elements of the weight a state's entry is; states that are not named here have one per element."""
    whole_states: ClassVar[frozenset[str]] = frozenset()
    """States of the whole weight, which each tensor-parallel rank has whole, with the same bits, where it has a part of the weight."""

    def fuses(self, weight: Tensor) -> bool:
        """Whether a step of `weight` also scales its gradient and rounds the result, in the same pass over memory (see `Entry`)."""
        return False

    def start(self, weight: Tensor, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a weight before its first step: names to tensors on the weight's device.

        `weight` is what the rank updates: the weight, a flat part of it, or a tensor-parallel part of `parameter`.
        """
        raise NotImplementedError

    def decode(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with `elements_per_entry` as numbers per element, float32 [numbers], which can be cut anywhere; names to tensors."""
        raise NotImplementedError

    def encode(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of what `decode` returned."""
        raise NotImplementedError

    def step(self, entries: Sequence[Entry], *, count: int, lr: float, weight_decay: float) -> None:
        """Step number `count` (from 1) of the weights in `entries`, with decoupled weight decay. Without autograd."""
        raise NotImplementedError


@dataclass(frozen=True)
class Group:
    """Weights that share a rule, a weight decay, and a factor on the learning rate."""

    names: tuple[str, ...]
    rule: Rule
    weight_decay: float
    lr_factor: float = field(default=1.0)


class Optimizer(Technique):
    """Groups the weights and gives each group its rule."""

    divides_stacks: ClassVar[bool] = True
    """Whether the step of some experts of a stack needs nothing of the others, so that ranks may each have some of them."""

    lr: float = Field(1e-3, gt=0, description="Peak learning rate; the schedule scales it.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay of matrices (vectors such as norms have none).")

    skip_step: SkipStep | None = Field(
        None, description="Skip steps whose loss or gradient norm is an outlier; true: with the defaults; empty: none."
    )

    rewind: Rewind | None = Field(
        None,
        description="Go back to a checkpoint before such a step, and leave out the batches since; true: with the defaults; empty: no.",
    )

    @model_validator(mode="after")
    def _skips_or_goes_back(self) -> Optimizer:
        if self.skip_step is not None and self.rewind is not None:
            raise ValueError("skip_step and rewind are two answers to one spike: give one of them")
        return self

    @property
    def on_spike(self) -> SkipStep | None:
        """What a spike is, if anything is done about one."""
        return self.rewind or self.skip_step

    @property
    def spare_batches(self) -> int:
        """Batches that may be read beside those of the steps."""
        return self.rewind.spare if self.rewind else 0

    def groups(self, parameters: Mapping[str, Parameter]) -> list[Group]:
        """Every parameter in exactly one group."""
        raise NotImplementedError

    def cost(self, dims: ModelDims, dtype: str, device: str) -> UpdateCost:
        """Bytes and work of one update of a model trained in `dtype` on `device`."""
        raise NotImplementedError


def by_decay(
    parameters: Mapping[str, Parameter], names: Sequence[str], rule: Rule, weight_decay: float, lr_factor: float = 1.0
) -> list[Group]:
    """`names` in two groups of one rule: matrices, which decay, and vectors, which do not. An empty one is left out.

    Biases of several experts [E, N] are vectors.
    """
    matrices = tuple(name for name in names if len(parameters[name].shape) >= 2 and not name.endswith(".bias"))
    vectors = tuple(name for name in names if name not in matrices)
    groups = [Group(matrices, rule, weight_decay, lr_factor), Group(vectors, rule, 0.0, lr_factor)]
    return [group for group in groups if group.names]
