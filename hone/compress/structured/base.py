"""Base of the structured pruners: which layers, heads and channels of a model stay, from calibration inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from hone.base.errors import SpecError
from hone.base.run import Run
from hone.base.table import Technique
from hone.cost.compress import Passes

if TYPE_CHECKING:
    from hone.compress.capture import Flow
    from hone.compress.structured.cut import Cut
    from hone.model.config import ModelConfig
    from hone.model.weights.model import ModelSource

ALIGNMENT = 32
"""Sizes computed from a fraction are multiples of it, as tensor cores and groups of quantized weights need."""

Size = Annotated[int | float, Field(gt=0)]
"""A number of layers, heads or channels; below 1 the fraction of them that stays."""


class StructuredPruner(Technique):
    """A step that removes whole layers, heads or channels; a subclass writes `shrink`, `choose` and `passes`.

    The result is a dense model with a smaller config. Such steps come first: each works on the model that the one
    before it leaves, and the steps for matrices on the model that the last one leaves.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights:float"})

    def shrink(self, config: ModelConfig) -> ModelConfig:
        """The config of the result; which of several equally large layers stay is not known yet.

        Raises SpecError when the step cannot make such a model from one of `config`.
        """
        raise NotImplementedError

    def choose(self, checkpoint: ModelSource, flow: Flow | None, run: Run) -> tuple[Cut, dict[str, Any]]:
        """What stays of `checkpoint`, and what the artifact says about it. `flow` is None if `passes` is."""
        raise NotImplementedError

    def passes(self, config: ModelConfig) -> Passes | None:
        """The passes over the calibration inputs by which `choose` measures; None if it needs no such inputs."""
        raise NotImplementedError


def size_of(wanted: int | float, given: int, field: str, multiple: int = 1) -> int:
    """The size that `field` asks for out of `given`; a fraction is rounded down to a multiple of `multiple`.

    Raises SpecError unless something is removed and something stays.
    """
    size = wanted
    if wanted < 1:
        size = max(math.floor(wanted * given) // multiple * multiple, multiple)
    if size != int(size) or not 0 < size < given:
        raise SpecError(
            f"{field} is {wanted:g}, of {given}",
            fix=f"give a whole number from 1 to {given - 1}, or a fraction below 1" if given > 1 else f"drop {field}",
        )
    return int(size)


def aligned(given: int) -> int:
    """The largest power of two up to `ALIGNMENT` that divides `given`."""
    return math.gcd(given, ALIGNMENT)


def largest(scores: list[float], count: int) -> tuple[int, ...]:
    """The places of the `count` largest scores, in order; of equal scores the first stay."""
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return tuple(sorted(order[:count]))


def structured_first(steps: Iterable[Technique]) -> None:
    """Raises ValueError when a structured pruner follows a step of another kind."""
    other = ""
    for step in steps:
        if not isinstance(step, StructuredPruner):
            other = step.kind
        elif other:
            raise ValueError(f"{step.kind} changes the shapes of matrices: put it before {other}")
