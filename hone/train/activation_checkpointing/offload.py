"""Offload of activations: layers' saved tensors wait in the host's memory and come back one layer ahead of the backward pass."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.cost.activations.segments import Segment
from hone.train.activation_checkpointing.base import ActivationCheckpointing, Segments, Sizes


class Offload(ActivationCheckpointing):
    """Copies layers' activations to pinned host memory beside the work and back one layer ahead of their backward pass. Rhu et al. 2016 (vDNN), arXiv:1602.08124."""

    paper: ClassVar[str] = "arXiv:1602.08124"
    recompute: bool = Field(
        False, description="Recompute each layer from its input, which alone is copied: less to copy, more to compute."
    )
    keep_last: int = Field(1, ge=0, description="Last layers that stay on the device: they are needed first.")

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """One segment per layer; all but the last `keep_last` wait on the host."""
        away = max(num_layers - self.keep_last, 0)
        return tuple(Segment(layer, layer + 1, self.recompute, to_host=layer < away) for layer in range(num_layers))

    def check(self, *, compile: bool, stages: int) -> None:
        """A compiled layer's saved tensors are chosen by the compiler, among them weights."""
        super().check(compile=compile, stages=stages)
        if compile:
            raise ValueError(f"compile does not work with activation_checkpointing {self.kind}: take every_nth or sqrt")
