"""Rotations: the residual stream, value heads and inputs of down projections are turned, which spreads outliers over all channels.

A rotation R of x and the inverse R^T in the weights that read x cancel (`hone.compress.transforms.turning` says where). R1 turns
the residual stream and R2 every value head, both in the weights alone; R4 turns the inputs of down projections at run time.
Names of SpinQuant, arXiv:2405.16406.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hone.compress.step import ModelStep, Phase, Step, Targets
from hone.compress.transforms.base import Transform
from hone.compress.transforms.turning import Turning
from hone.cost.work import Work

if TYPE_CHECKING:
    from pathlib import Path

    from hone.base.run import Run
    from hone.compress.capture import Flow
    from hone.model.weights.model import ModelSource

ROTATE_BYTES = 450.0
"""Bytes a weight, at the rate of a large copy, of a product in float64 (40 ns, two-core AMD EPYC with other work)."""
ROTATE_GPU_BYTES = 4000.0
"""The same on a GPU, where most is the copy from the host and back: 4 bytes a weight at 5 GB/s (not measured)."""


class Rotation(Turning, Transform, ModelStep):
    """Rotates residual stream and value heads by random Hadamard matrices, and inputs of down projections at run time. Ashkboos et al. 2024, arXiv:2404.00456."""

    paper: ClassVar[str] = "arXiv:2404.00456"
    phase: ClassVar[Phase] = "model"

    def check_place(self, before: Sequence[Step], after: Sequence[Step]) -> None:
        super().check_place(before, after)
        earlier = [one for one in before if one.phase == "model" and not one.reshapes]
        if earlier:
            raise ValueError(self.too_late(earlier[-1]))

    def too_late(self, other: Step) -> str:
        if other.phase == "matrix":
            return super().too_late(other)
        return f"{self.kind} comes after {other.kind}: it changes the model that others read"

    @property
    def needs_quantizer(self) -> str:
        return "with r4 multiplies inputs at run time, which gains nothing without a quantizer" if self.r4 else ""

    @property
    def stands_alone(self) -> str:
        return "with r4 stands between up and down, through which no scale can be moved" if self.r4 else ""

    @property
    def multiplies_inputs(self) -> bool:
        return self.r4

    @property
    def checked_against(self) -> str:
        return ", its rotated weights in the dtype of the checkpoint"

    @property
    def note(self) -> str:
        if not self.r4:
            return ""
        return (
            "r4 is stored as transform_config, which hone and vLLM compute; transformers 5.23 ignores it without a word, "
            "and the model is then wrong: use r4=false for transformers"
        )

    def work(self, rows: int, columns: int) -> Work:
        """Products with the factors of one or two Hadamard matrices in float64."""
        on_gpu = Work(num_bytes=ROTATE_GPU_BYTES * rows * columns, num_ops=60)
        return Work(num_bytes=ROTATE_BYTES * rows * columns, num_ops=60, on_gpu=on_gpu)

    @property
    def ends_bytes(self) -> float:
        """Bytes moved for each weight of the embedding and the head, which are rotated whenever they are read."""
        return 3 * ROTATE_BYTES if self.r1 else 0.0

    def rewrite(
        self, checkpoint: ModelSource, flow: Flow | None, targets: Targets, state: Path, run: Run
    ) -> tuple[ModelSource, dict[str, Any]]:
        from hone.compress.transforms.rotated import rotated

        return rotated(checkpoint, self, self.hadamards(checkpoint.config, targets), run), {}
