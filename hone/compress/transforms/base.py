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

    needs_quantizer: ClassVar[bool] = False
    """Whether it fits the layer to the quantizer that follows, and has nothing to do without one."""

    def change(self, layer: LayerWeights) -> None:
        """Changes the weights of `layer`, whose outputs stay the same; must depend on nothing but `layer`."""
        raise NotImplementedError

    def apply(self, matrix: Matrix) -> None:
        raise AssertionError(f"{self.kind} changes layers, not single matrices")

    def work(self, rows: int, columns: int) -> Work:
        """A few passes over the matrix, and over the sum of x x^T of its inputs."""
        return Work(num_bytes=40.0 * rows * columns + 12.0 * columns * columns, num_ops=30)


def transforms_first(steps: Iterable[Step]) -> None:
    """Raises ValueError when a transform follows another step, or lacks the quantizer it is fitted to."""
    steps, other = tuple(steps), ""
    for step in steps:
        if not isinstance(step, Transform):
            other = step.kind
        elif other:
            raise ValueError(f"{step.kind} comes after {other}: transforms are the first steps")
        elif step.needs_quantizer and quantizer_of(steps) is None:
            raise ValueError(f"{step.kind} is fitted to a quantizer: add one after it, such as rtn with scale: search")
