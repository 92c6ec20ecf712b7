"""Activation checkpointing by rule: none, every layer, every n-th one, given ones, and segments of sqrt(L) layers."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, field_validator

from hone.base.errors import SpecError
from hone.cost.activations.segments import Segment, keep_all
from hone.train.activation_checkpointing.base import ActivationCheckpointing, Segments, Sizes


class KeepAll(ActivationCheckpointing):
    """Keeps every activation: fastest, and most memory."""

    by_rule: ClassVar[bool] = True

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """One segment per layer, none recomputed."""
        return keep_all(num_layers)


class Full(ActivationCheckpointing):
    """Recomputes every layer, in segments of recompute_num_layers: least memory of the rules with 1, and a third more work. Chen et al. 2016, arXiv:1604.06174."""

    paper: ClassVar[str] = "arXiv:1604.06174"
    by_rule: ClassVar[bool] = True
    recompute_num_layers: int = Field(1, ge=1, description="Layers between two inputs that are kept.")

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """Segments of `recompute_num_layers` layers, all recomputed."""
        length = self.recompute_num_layers
        return tuple(Segment(at, min(at + length, num_layers), True) for at in range(0, num_layers, length))


class EveryNth(ActivationCheckpointing):
    """Recomputes every n-th layer; n = 1 recomputes all, one at a time. Chen et al. 2016, arXiv:1604.06174."""

    paper: ClassVar[str] = "arXiv:1604.06174"
    by_rule: ClassVar[bool] = True
    n: int = Field(1, ge=1, description="Of n consecutive layers, the first is recomputed.")

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """One segment per layer; layers 0, n, 2n, ... are recomputed."""
        return tuple(Segment(layer, layer + 1, layer % self.n == 0) for layer in range(num_layers))


class Listed(ActivationCheckpointing):
    """Recomputes the layers that are listed, such as those that `hone plan` chose for the memory of each pipeline stage. Chen et al. 2016, arXiv:1604.06174."""

    paper: ClassVar[str] = "arXiv:1604.06174"
    by_rule: ClassVar[bool] = True
    layers: tuple[int, ...] = Field((), description="Numbers of the layers that are recomputed, from 0 on.")

    @field_validator("layers")
    @classmethod
    def _once(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if any(one < 0 for one in layers) or len(set(layers)) < len(layers):
            raise ValueError("layers are numbers from 0 on, each once")
        return tuple(sorted(layers))

    def check(self, *, compile: bool, stages: int) -> None:
        """An empty list would do nothing."""
        super().check(compile=compile, stages=stages)
        if not self.layers:
            raise ValueError("activation_checkpointing layers lists none: give layers: [0, 1, 2], or take none")

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """One segment per layer; those of `layers` are recomputed. Raises SpecError for a layer that the model does not have."""
        if self.layers and self.layers[-1] >= num_layers:
            raise SpecError(
                f"activation_checkpointing.layers has {self.layers[-1]}, and the model has the layers 0 to {num_layers - 1}",
                fix=f"list layers below {num_layers}",
            )
        return tuple(Segment(layer, layer + 1, layer in self.layers) for layer in range(num_layers))


class SquareRoot(ActivationCheckpointing):
    """Recomputes about sqrt(L) segments of sqrt(L) layers: O(sqrt(L)) memory for one more forward pass. Chen et al. 2016, arXiv:1604.06174."""

    paper: ClassVar[str] = "arXiv:1604.06174"
    by_rule: ClassVar[bool] = True

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """Segments of ceil(sqrt(L)) layers, all recomputed but the last, whose backward pass comes first."""
        length = math.isqrt(max(num_layers - 1, 0)) + 1
        return tuple(
            Segment(start, min(start + length, num_layers), start + length < num_layers)
            for start in range(0, num_layers, length)
        )
