"""The compress stage: writes a smaller model folder from a given one, by an ordered list of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hone.base.artifact import Artifact, Draft
from hone.base.lazy import lazy
from hone.base.plan import Facts
from hone.base.run import Run
from hone.compress.spec import CompressSpec
from hone.feed.plain import local_files
from hone.measure.machine import Machine

if TYPE_CHECKING:
    from hone.compress.planning import CompressPlan

planning = lazy("hone.compress.planning")
running = lazy("hone.compress.engine.running")


class Compress(CompressSpec):
    """Prunes and quantizes a model layer by layer; the folder it writes loads in transformers and stays packed in hone."""

    stage: ClassVar[str] = "compress"
    roles: ClassVar[dict[str, bool]] = {"model": True, "data": False}
    every_rank: ClassVar[bool] = True

    @property
    def has_goal(self) -> bool:
        """Whether `fit`, `target_latency` or `max_kl` is given in place of steps."""
        return not self.steps

    def remedies(self) -> Iterable[Sequence[tuple[str, str]]]:
        """Smaller batches, fewer sequences, and a narrower dtype."""
        return planning.remedies(self)

    def files(self) -> dict[str, Path]:
        """The calibration texts: others at the same path change the fingerprint."""
        return {} if self.calibration_text is None else local_files(self.calibration_text, "calibration_text")

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> CompressPlan:
        """Exact size of the compressed model; seconds and memory from its shapes. Raises SpecError where steps do not support it.

        Of given steps; those that `fit` or `target_latency` ask for are found by `priced` (`hone.plan.fitting`).
        """
        return planning.planned(self, facts, machine)

    def run(self, plan: CompressPlan, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Writes the model shard by shard, resuming after the last complete layer."""
        running.compress(self, plan, draft, parents, run)
