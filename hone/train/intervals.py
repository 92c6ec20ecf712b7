"""What a training does every so many steps: checkpoints and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hone.base.mesh import Mesh
from hone.base.spec import Circumstance, Spec

if TYPE_CHECKING:
    from hone.train.checkpoint import Checkpoints


class Checkpointing(Spec):
    """How often checkpoints are written, and how many are kept while the stage runs."""

    interval: int = Field(
        100, ge=0, description="Steps between checkpoints; 0: none, so that a killed training starts over."
    )
    keep_latest_k: int = Field(2, gt=0, description="Checkpoints kept while the stage runs.")
    async_mode: Literal["disabled", "async"] = Field(
        "disabled",
        description="async: a step waits for a copy of the state in the host's memory, which a thread then writes.",
    )

    def opened(self, folder: Path, mesh: Mesh) -> Checkpoints:
        """The checkpoints in `folder` of the ranks of `mesh`."""
        from hone.train.checkpoint import Checkpoints

        return Checkpoints(folder, self.keep_latest_k, mesh, background=self.async_mode == "async")

    def kept(self, steps: int) -> int:
        """Checkpoints on disk at once, at most, of a training of `steps`."""
        saved = (steps - 1) // self.interval if self.interval else 0
        return min(saved, self.keep_latest_k + 1)


class Validation(Spec):
    """How often the loss on the val split is computed, and on how much of it."""

    interval: Annotated[int, Circumstance()] = Field(
        0, ge=0, description="Steps between evaluations on the val split; 0: only at the end."
    )
    sequences: int = Field(64, ge=0, description="Sequences of the val split in an evaluation; 0: all.")
