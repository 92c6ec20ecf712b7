"""Activation checkpointing: layers whose activations are dropped in the forward pass and recomputed in the backward pass."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

from pydantic import Field

from hone.base.figure import Estimate
from hone.base.table import Technique


class Segment(NamedTuple):
    """Layers `start` to `stop` (exclusive); with `recompute`, only the segment's input is kept after the forward pass."""

    start: int
    stop: int
    recompute: bool


class ActivationCheckpointing(Technique):
    """A policy of activation checkpointing, which divides the layers into segments."""

    def segments(self, num_layers: int) -> tuple[Segment, ...]:
        """Divides `num_layers` layers into consecutive segments that cover all."""
        raise NotImplementedError

    def estimates(self, num_layers: int) -> dict[str, Estimate]:
        """For `num_layers` layers: the share of recomputed forward work, and the number of layers with activations in memory at once."""
        segments = self.segments(num_layers)
        repeated = sum(part.stop - part.start for part in segments if part.recompute)
        return {
            "recomputed_share": Estimate(
                value=repeated / num_layers, unit="fraction", formula="recomputed layers / layers"
            ),
            "live_layers": Estimate(
                value=float(live_layers(segments)),
                unit="layers",
                formula="layers that keep their activations + the longest recomputed segment",
            ),
        }


class KeepAll(ActivationCheckpointing):
    """Keeps every activation: fastest, and most memory."""

    def segments(self, num_layers: int) -> tuple[Segment, ...]:
        """One segment per layer, none recomputed."""
        return tuple(Segment(layer, layer + 1, False) for layer in range(num_layers))


class EveryNth(ActivationCheckpointing):
    """Recomputes every n-th layer; n = 1 recomputes all, one at a time. Chen et al. 2016, arXiv:1604.06174."""

    paper: ClassVar[str] = "arXiv:1604.06174"
    n: int = Field(1, ge=1, description="Of n consecutive layers, the first is recomputed.")

    def segments(self, num_layers: int) -> tuple[Segment, ...]:
        """One segment per layer; layers 0, n, 2n, ... are recomputed."""
        return tuple(Segment(layer, layer + 1, layer % self.n == 0) for layer in range(num_layers))


class SquareRoot(ActivationCheckpointing):
    """Recomputes about sqrt(L) segments of sqrt(L) layers: O(sqrt(L)) memory for one more forward pass. Chen et al. 2016, arXiv:1604.06174."""

    paper: ClassVar[str] = "arXiv:1604.06174"

    def segments(self, num_layers: int) -> tuple[Segment, ...]:
        """Segments of ceil(sqrt(L)) layers, all recomputed but the last, whose backward pass comes first."""
        length = math.isqrt(max(num_layers - 1, 0)) + 1
        return tuple(
            Segment(start, min(start + length, num_layers), start + length < num_layers)
            for start in range(0, num_layers, length)
        )


def live_layers(segments: tuple[Segment, ...]) -> int:
    """Number of layers with activations in memory at the peak of the backward pass."""
    kept = sum(part.stop - part.start for part in segments if not part.recompute)
    longest = max((part.stop - part.start for part in segments if part.recompute), default=0)
    # The last segment's activations are freed before an earlier one is recomputed; if it is kept, the peak is at the turn.
    tail = segments[-1]
    if not tail.recompute and kept == tail.stop - tail.start:
        return max(kept, longest)
    return kept + longest
