"""Base of the structured pruners: which layers, heads and channels of a model stay, from calibration inputs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from hone.base.durable import write_atomic
from hone.base.errors import SpecError
from hone.base.lazy import lazy
from hone.base.run import Run
from hone.compress.step import ModelStep, Step, Targets

if TYPE_CHECKING:
    from pathlib import Path

    from hone.compress.capture import Flow
    from hone.compress.structured.cut import Cut
    from hone.model.weights.model import ModelSource

cuts = lazy("hone.compress.structured.cut")

ALIGNMENT = 32
"""Sizes computed from a fraction are multiples of it, as tensor cores and groups of quantized weights need."""

Size = Annotated[int | float, Field(gt=0)]
"""A number of layers, heads or channels; below 1 the fraction of them that stays."""


class StructuredPruner(ModelStep):
    """A step that removes whole layers, heads or channels; a subclass writes `reshape`, `choose` and `passes`.

    The result is a dense model with a smaller config. Such steps come first: each works on the model that the one
    before it leaves, and the steps for matrices on the model that the last one leaves. Which of several equally large layers
    stay is not known from `reshape`.
    """

    reshapes: ClassVar[bool] = True
    targeted: ClassVar[bool] = False

    def too_late(self, other: Step) -> str:
        return f"{self.kind} changes the shapes of matrices: put it before {other.kind}"

    @property
    def reads_inputs(self) -> bool:
        return True

    def choose(self, checkpoint: ModelSource, flow: Flow | None, run: Run) -> tuple[Cut, dict[str, Any]]:
        """What stays of `checkpoint`, and what the artifact says about it. `flow` is None if `passes` is."""
        raise NotImplementedError

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        """The smaller model.

        What stays is durable as soon as it is measured. A run that is killed while it measures begins the measurement again.
        """
        entry = run.mesh.from_leader(lambda: json.loads(state.read_text(encoding="utf8")) if state.exists() else None)
        if entry is None:
            made, words = self.choose(checkpoint, flow if self.passes(checkpoint.config) else None, run)
            entry = {"cut": made.to_json(), "said": words}
            if run.mesh.leads:
                write_atomic(state, json.dumps(entry).encode())
        return cuts.cut_model(checkpoint, cuts.Cut.of_json(entry["cut"])), entry["said"]


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
