"""Plans: what a stage will cost and what it will make, said before anything exists; and facts, what an artifact is.

A stage plans from the facts of its parents and gives the facts of what it will make, so that a whole recipe is planned
before its first stage runs. Facts are read from a folder that is there (`facts_of`), or come from a plan.
"""

from __future__ import annotations

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
    "data": "hone.data.facts:DataFacts",
    "model": "hone.model.facts:CheckpointFacts",
}
"""What a folder may hold to the class that reads its facts, imported on use. The first whose `mark` lies there is taken."""

MEMORY, DISK = "memory_growth_bytes", "disk_bytes"
"""The estimates that a machine can be too small for."""

_DISK_WAYS = ("free some space", "write to another disk: --out or --work", "delete artifacts that are no longer needed")


class Machine(Protocol):
    """What a plan asks of a machine; `hone.measure.machine.Machine` is one."""

    device: str
    calibration: Any

    @property
    def free_memory_bytes(self) -> float:
        """Memory that work on `device` may still take."""
        ...


class Facts(BaseModel):
    """What is known of an artifact without opening its large files. Rooms subclass it for what they make."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    noun: ClassVar[str] = "artifact"
    """What messages call it."""
    mark: ClassVar[str] = ""
    """File that a folder with such facts holds."""

    where: str = Field(description="Folder it lies in, or the stage of a recipe that will make it: for messages.")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The facts of what lies in `folder`. Raises ArtifactError when a file is missing or corrupt."""
        raise NotImplementedError(f"{cls.__name__}.of")

    @classmethod
    def refuse(cls, folder: Path) -> None:
        """Raises ArtifactError when `folder`, which lacks `mark`, holds something known that is no such artifact."""

    @property
    def given(self) -> frozenset[str]:
        """What it gives to techniques, by the names that `Technique.needs` uses: 'weights:float', 'calibration'."""
        return frozenset()


F = TypeVar("F", bound=Facts)


def facts_of(artifact: Artifact) -> Facts:
    """The facts of an artifact, or of a foreign folder. Raises ArtifactError when it is nothing that a stage works from."""
    marks = []
    for row in FACTS.values():
        cls = resolve(row)
        if (artifact.folder / cls.mark).exists():
            return cls.of(artifact.folder)
        cls.refuse(artifact.folder)
        marks.append(f"no {cls.mark} ({cls.noun})")
    raise ArtifactError(
        f"{artifact.folder} has {' and '.join(reversed(marks))}",
        fix="point at a folder that a hone stage or transformers wrote",
    )


def need(facts: Mapping[str, Facts], role: str, kind: type[F]) -> F:
    """The facts of the parent in `role`. Raises ArtifactError when they are of another kind."""
    found = facts[role]
    if not isinstance(found, kind):
        raise ArtifactError(
            f"{role} is {found.where}, which holds a {found.noun}, not a {kind.noun}",
            fix=f"give a folder with {kind.mark} as {role}",
        )
    return found


class Shortage(NamedTuple):
    """An estimate that is more than the machine has."""

    name: str
    needed: float
    has: float
    formula: str
    ways: tuple[str, ...]

    def __str__(self) -> str:
        what = self.name.removesuffix("_bytes").removesuffix("_growth")
        return f"needs {human_bytes(self.needed)} of {what}, has {human_bytes(max(self.has, 0))}"


class Plan(BaseModel):
    """What a stage will cost and make. A stage with more to hand from `plan` to `run` subclasses it.

    `estimates` are by figure name: `time_s`, `memory_growth_bytes` (what the work adds at its peak to what is in use;
    `peak_memory_bytes` follows from it when the work begins), `disk_bytes` (the finished folder), `energy_j` where a
    model of it exists, and every figure that can be said before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    estimates: dict[str, Estimate] = Field(default_factory=dict, description="Estimates by figure name.")
    facts: SerializeAsAny[Facts] | None = Field(
        None, description="What will be made; None: nothing a stage works from."
    )
    ways: dict[str, tuple[str, str, str]] = Field(
        default_factory=dict, description="By estimate: three ways out when the machine has less."
    )

    def shortages(self, capacity: Mapping[str, float]) -> list[Shortage]:
        """What does not fit: estimates larger than the capacity of the same name."""
        ways = {DISK: _DISK_WAYS, **self.ways}
        return [
            Shortage(name, estimate.value, capacity[name], estimate.formula, ways.get(name, ()))
            for name, estimate in self.estimates.items()
            if name in capacity and estimate.value > capacity[name]
        ]

    def must_fit(self, capacity: Mapping[str, float], where: str) -> None:
        """Raises FitError for the first shortage, with its ways out. `where` names the stage and the device."""
        for short in self.shortages(capacity):
            raise FitError(f"{where} {short} ({short.formula})", fix="; or ".join(short.ways))


def capacity(machine: Machine, out: Path) -> dict[str, float]:
    """What there is, by the name of the estimate that it limits: memory of `machine`, free space where `out` will lie."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    begun = partial_of(out)
    there = sum(path.stat().st_size for path in begun.rglob("*") if path.is_file()) if begun.is_dir() else 0
    return {MEMORY: machine.free_memory_bytes, DISK: shutil.disk_usage(folder).free + there}


class Applied(Protocol):
    """What `check_order` asks of a technique."""

    kind: str
    needs: ClassVar[frozenset[str]]
    gives: ClassVar[frozenset[str]]
    takes: ClassVar[frozenset[str]]


def check_order(steps: Iterable[Applied], given: frozenset[str], ways: Mapping[str, str]) -> frozenset[str]:
    """The facts that hold after `steps`, in order, when `given` hold before: each gives some and takes some away.

    Raises SpecError for the first step that needs a fact that does not hold. `ways` says how to come by each fact.
    """
    taken: dict[str, str] = {}
    for step in steps:
        for fact in sorted(step.needs - given):
            before = f", which {taken[fact]} before it takes away" if fact in taken else ""
            raise SpecError(
                f"{step.kind} needs {fact}{before}",
                fix=f"put {step.kind} before {taken[fact]}" if fact in taken else ways.get(fact, f"give {fact} first"),
            )
        given = (given | step.gives) - step.takes
        taken |= dict.fromkeys(step.takes, step.kind)
    return given
