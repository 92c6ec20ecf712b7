"""Plans: the estimates and the output of a stage before anything exists; and facts, the description of an artifact.

A stage plans from the facts of its parents and returns the facts of its output, so that a whole recipe is planned
before its first stage runs. Facts are read from a finished folder (`facts_of`) or come from a plan.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, FitError, SpecError
from hone.base.figure import Estimate, human_bytes
from hone.base.lazy import resolve
from hone.base.partial import partial_of

FACTS: dict[str, str] = {
    "data": "hone.feed.facts:DataFacts",
    "drafter": "hone.model.drafters.folder:DrafterFacts",
    "logits": "hone.train.cached_logits.facts:LogitsFacts",
    "model": "hone.model.facts:CheckpointFacts",
}
"""The classes that read the facts of a folder, imported on use. The first whose `mark` is in the folder is used."""

MEMORY, DISK = "memory_growth_bytes", "disk_bytes"
"""The estimates that can exceed a machine's capacity."""

PEAK = "peak_memory_bytes"
"""The memory of the whole process: `MEMORY` and what the process takes before the work."""

_DISK_WAYS = ("free some space", "write to another disk: --out or --work", "delete artifacts that are no longer needed")


class Machine(Protocol):
    """The attributes of a machine that plans use; `hone.measure.machine.Machine` is one."""

    device: str
    calibration: Any
    num_ranks: int

    @property
    def process_bytes(self) -> float:
        """Memory of `device` that a process with torch takes before it works."""
        ...

    @property
    def resident_bytes(self) -> float:
        """Memory of `device` that this process takes now."""
        ...

    @property
    def free_memory_bytes(self) -> float:
        """Memory of `device` that can still be allocated."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether it is not this machine, whose disk says nothing then."""
        ...

    def on_ranks(self, num_ranks: int) -> Self:
        """So many ranks, each with the memory of this one; they need not be there."""
        ...


class Facts(BaseModel):
    """What is known of an artifact without reading its large files. Rooms subclass it for their artifacts."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    noun: ClassVar[str] = "artifact"
    """Its name in messages."""
    mark: ClassVar[str] = ""
    """File by which a folder with such facts is recognized."""

    where: str = Field(description="Its folder, or the stage of a recipe that will make it, for messages.")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of the artifact in `folder`. Raises ArtifactError when a file is missing or corrupt."""
        raise NotImplementedError(f"{cls.__name__}.of")

    @classmethod
    def marks(cls, folder: Path) -> bool:
        """Whether `folder` is one of such an artifact."""
        return (folder / cls.mark).exists()

    @classmethod
    def refuse(cls, folder: Path) -> None:
        """Raises ArtifactError when `folder`, which lacks `mark`, is something known that is not such an artifact."""

    @property
    def given(self) -> frozenset[str]:
        """The properties that techniques may need, named as in `Technique.needs`: 'weights:float', 'calibration'."""
        return frozenset()


F = TypeVar("F", bound=Facts)


def facts_of(artifact: Artifact) -> Facts:
    """The facts of an artifact, or of a foreign folder. Raises ArtifactError when no stage can use it."""
    marks = []
    for row in FACTS.values():
        cls = resolve(row)
        if cls.marks(artifact.folder):
            return cls.of(artifact.folder)
        cls.refuse(artifact.folder)
        if cls.mark:
            marks.append(f"no {cls.mark} ({cls.noun})")
    raise ArtifactError(
        f"{artifact.folder} has {' and '.join(reversed(marks))}",
        fix="give a folder that a hone stage or transformers wrote",
    )


def need(facts: Mapping[str, Facts], role: str, kind: type[F]) -> F:
    """The facts of the parent in `role`. Raises ArtifactError when they are of another kind."""
    found = facts[role]
    if not isinstance(found, kind):
        raise ArtifactError(
            f"{role} is {found.where}, which is a {found.noun}, not a {kind.noun}",
            fix=f"give a folder with {kind.mark} as {role}",
        )
    return found


class Shortage(NamedTuple):
    """An estimate that exceeds the machine's capacity."""

    name: str
    needed: float
    has: float
    formula: str
    ways: tuple[str, ...]

    def __str__(self) -> str:
        what = self.name.removesuffix("_bytes").removesuffix("_growth")
        return f"needs {human_bytes(self.needed)} of {what}, has {human_bytes(max(self.has, 0))}"


class Plan(BaseModel):
    """Estimates and output of a stage. A stage that passes more from `plan` to `run` subclasses it.

    `estimates` are by figure name: `time_s`, `memory_growth_bytes` (the peak of the memory that the work adds;
    `peak_memory_bytes` follows from it when the work begins), `disk_bytes` (the finished folder), `energy_j` where a
    model of it exists, and every figure that can be estimated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    estimates: dict[str, Estimate] = Field(default_factory=dict, description="Estimates by figure name.")
    facts: SerializeAsAny[Facts] | None = Field(None, description="The output's facts; None: no stage can use it.")
    ways: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Ways out for each estimate that exceeds the machine; `Stage.with_ways` tries others.",
    )
    chosen: Any = Field(None, description="The spec that was found for a goal; None: the stage's own.")
    notes: tuple[str, ...] = Field((), description="What the plan chose by itself and why, a line each.")

    def shortages(self, capacity: Mapping[str, float]) -> list[Shortage]:
        """The estimates that are larger than the capacity of the same name."""
        ways = {DISK: _DISK_WAYS, **self.ways}
        return [
            Shortage(name, estimate.value, capacity[name], estimate.formula, ways.get(name, ()))
            for name, estimate in self.estimates.items()
            if name in capacity and estimate.value > capacity[name]
        ]

    def must_fit(self, capacity: Mapping[str, float], where: str) -> None:
        """Raises FitError for the first shortage, with ways out. `where` names the stage and the device."""
        for short in self.shortages(capacity):
            raise FitError(f"{where} {short} ({short.formula})", fix="; or ".join(short.ways))


def capacity(machine: Machine, out: Path) -> dict[str, float]:
    """The capacity for each limited estimate: memory of `machine`, free disk space at `out`."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    begun = partial_of(out)
    there = sum(path.stat().st_size for path in begun.rglob("*") if path.is_file()) if begun.is_dir() else 0
    free = math.inf if machine.elsewhere else shutil.disk_usage(folder).free
    return {MEMORY: machine.free_memory_bytes, DISK: free + there}


class Applied(Protocol):
    """The attributes of a technique that `check_order` uses."""

    kind: str
    needs: ClassVar[frozenset[str]]
    gives: ClassVar[frozenset[str]]
    takes: ClassVar[frozenset[str]]


def check_order(steps: Iterable[Applied], given: frozenset[str], ways: Mapping[str, str]) -> frozenset[str]:
    """The properties that hold after `steps`, in order, when `given` hold before: each adds and removes some.

    Raises SpecError for the first step that needs a missing one. `ways` gives the fix for each.
    """
    taken: dict[str, str] = {}
    for step in steps:
        for missing in sorted(step.needs - given):
            before = f", which {taken[missing]} removes" if missing in taken else ""
            raise SpecError(
                f"{step.kind} needs {missing}{before}",
                fix=f"put {step.kind} before {taken[missing]}"
                if missing in taken
                else ways.get(missing, f"give {missing} first"),
            )
        given = (given | step.gives) - step.takes
        taken |= dict.fromkeys(step.takes, step.kind)
    return given
