"""The methods of a writer of curves."""

from __future__ import annotations

from typing import Protocol


class Curves(Protocol):
    """Receives the scalars of a training, step by step, on rank 0."""

    def add(self, scalars: dict[str, float], step: int) -> None:
        """Adds a point at `step` to each named curve."""

    def back(self, step: int) -> None:
        """The training went back to `step`: the points that come next are of the steps after it, again."""

    def flush(self) -> None:
        """Makes what was added durable, as far as the writer can."""

    def close(self, *, whole: bool) -> None:
        """Ends the curves; `whole` says whether the training reached its last step."""
