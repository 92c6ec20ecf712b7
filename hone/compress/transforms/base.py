"""Base of the transforms: steps that change all weights of a layer, which still computes the same, before others compress them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from hone.compress.matrix import Matrix, Step, quantizer_of
from hone.cost.compress import Work

if TYPE_CHECKING:
    from hone.compress.layer import LayerWeights


class Transform(Step):
    """A step that moves the size of weights between a layer's linears and norms; a subclass writes `change`."""

    needs_quantizer: ClassVar[str] = ""
    """Why it has nothing to do without the quantizer that follows, as a predicate; empty where it works without one."""
    whole: ClassVar[bool] = False
    """Whether it changes the checkpoint that the engine reads, before all other steps, and no layer in the engine."""

    @property
    def stands_alone(self) -> str:
        """Why no other transform may follow, as a predicate; empty where one may."""
        return ""

    def change(self, layer: LayerWeights) -> None:
        """Changes the weights of `layer`, whose outputs stay the same; must depend on nothing but `layer`."""
        raise NotImplementedError

    def apply(self, matrix: Matrix) -> None:
        raise AssertionError(f"{self.kind} changes layers, not single matrices")

    def work(self, rows: int, columns: int) -> Work:
        """A few passes over the matrix, and over the sum of x x^T of its inputs."""
        return Work(num_bytes=40.0 * rows * columns + 12.0 * columns * columns, num_ops=30)


def transforms_first(steps: Iterable[Step]) -> None:
    """Raises ValueError when a transform follows another step, or lacks the quantizer that it needs."""
    steps, other = tuple(steps), ""
    for place, step in enumerate(steps):
        if not isinstance(step, Transform):
            other = step.kind
        elif other:
            raise ValueError(f"{step.kind} comes after {other}: transforms are the first steps")
        elif place and steps[place - 1].stands_alone:
            raise ValueError(f"{steps[place - 1].kind} {steps[place - 1].stands_alone}: leave {step.kind} out")
        elif step.whole and place:
            raise ValueError(f"{step.kind} comes after {steps[place - 1].kind}: it changes the model that others read")
        elif step.needs_quantizer and quantizer_of(steps) is None:
            raise ValueError(f"{step.kind} {step.needs_quantizer}: add one after it, such as rtn with scale: search")
