"""Base of the transforms: steps that change all weights of a layer, which still computes the same, before others compress them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hone.base.errors import SpecError
from hone.compress.step import Phase, Step, giving
from hone.cost.work import Work

if TYPE_CHECKING:
    from hone.compress.layer import LayerWeights
    from hone.model.config import ModelConfig


class Transform(Step):
    """A step that moves the size of weights between a layer's linears and norms; a subclass writes `change`."""

    phase: ClassVar[Phase] = "layer"
    needs_quantizer: ClassVar[str] = ""
    """Why it has nothing to do without the quantizer that follows, as a predicate; empty where it works without one."""

    def change(self, layer: LayerWeights) -> None:
        """Changes the weights of `layer`, whose outputs stay the same; must depend on nothing but `layer`."""
        raise NotImplementedError

    def check_place(self, before: Sequence[Step], after: Sequence[Step]) -> None:
        super().check_place(before, after)
        alone = [one for one in before if one.stands_alone]
        if alone:
            raise ValueError(f"{alone[0].kind} {alone[0].stands_alone}: leave {self.kind} out")
        if self.needs_quantizer and giving("weights:quantized", (*before, *after)) is None:
            raise ValueError(f"{self.kind} {self.needs_quantizer}: add one after it, such as rtn with scale: search")

    def too_late(self, other: Step) -> str:
        return f"{self.kind} comes after {other.kind}: transforms are the first steps"

    def check_model(self, config: ModelConfig) -> None:
        for index, layer in enumerate(config.layers):
            if layer.mixer.reuses_kv:
                raise SpecError(
                    f"layer {index} uses the values of another layer, and a transform changes one layer at a time",
                    fix="compress without transforms",
                )

    def work(self, rows: int, columns: int) -> Work:
        """A few passes over the matrix, and over the sum of x x^T of its inputs."""
        return Work(num_bytes=40.0 * rows * columns + 12.0 * columns * columns, num_ops=30)
