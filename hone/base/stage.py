"""A stage: a spec that plans and makes one artifact from others. The rooms of the verbs have one each, in `stage.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hone.base.artifact import Artifact, Draft, finished, start
from hone.base.errors import HoneError, SpecError, did_you_mean
from hone.base.figure import human_bytes
from hone.base.lazy import resolve
from hone.base.plan import MEMORY, PEAK, Facts, Machine, Plan, capacity, facts_of
from hone.base.provenance import own_version
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.base.spec import Spec

STAGES: dict[str, str] = {
    "data": "hone.data.stage:Data",
    "train": "hone.train.stage:Train",
    "teach": "hone.train.cached_logits.stage:Teach",
    "compress": "hone.compress.stage:Compress",
    "eval": "hone.eval.stage:Eval",
    "serve": "hone.serve.stage:Serve",
}
"""The class of each kind of stage, imported on use by recipes and the CLI."""

GOALS: dict[str, str] = {"compress": "hone.plan.fitting:fitted"}
"""The function (stage, facts, machine) -> Plan that finds the spec of a stage that states a goal, imported on use."""

MACHINE = "hone.measure.machine:machine_of"
"""The function that describes the machine of a run, imported on use."""


NUM_WAYS = 3
"""Ways out that are printed."""

MOST_RANKS = 1 << 14
"""The most ranks of which a plan says that they would be enough."""

_HELPS = 0.98
"""What a change must leave of the memory to be proposed."""


class Stage(Spec):
    """What one stage computes. A subclass sets `stage` and `roles` and implements `plan` and `run`.

    `roles` maps each parent's role to whether it is required. A role in `several` may have
    several parents, as ROLE.NAME.
    """

    stage: ClassVar[str]
    roles: ClassVar[dict[str, bool]] = {}
    several: ClassVar[frozenset[str]] = frozenset()
    every_rank: ClassVar[bool] = False
    """Whether all ranks run it, each a part of the work; else rank 0 alone runs it."""
    uses_torch: ClassVar[bool] = True
    """Whether its process imports torch, which takes more memory than most small models."""

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """Estimates of the stage on `machine` and the facts of its output, from the `facts` of its parents by role.

        Needs no parent to exist, and reads none. Raises HoneError when the stage cannot run on such parents.
        """
        raise NotImplementedError(f"{type(self).__name__}.plan")

    @property
    def has_goal(self) -> bool:
        """Whether it says what its output must be like (a size, a latency) in place of how it is made."""
        return False

    def priced(self, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """`plan`; where the spec states a goal, that of the spec which `GOALS` finds for it, which is in the plan as `chosen`."""
        return resolve(GOALS[self.stage])(self, facts, machine) if self.has_goal else self.plan(facts, machine)

    def remedies(self) -> Iterable[Sequence[tuple[str, str]]]:
        """Changes that may need less memory, the mildest field first: for each field (name, value) pairs, the mildest first."""
        return ()

    def full_plan(self, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """`plan` with the memory of the whole process; see `with_ways`."""
        planned = self.priced(facts, machine)
        growth = planned.estimates.get(MEMORY)
        if growth is not None:
            before = machine.process_bytes if self.uses_torch else machine.resident_bytes
            formula = f"before the work {human_bytes(before)} + {growth.formula}"
            peak = growth.model_copy(update={"value": before + growth.value, "formula": formula})
            planned = planned.model_copy(update={"estimates": {**planned.estimates, PEAK: peak}})
        return self.with_ways(planned, facts, machine)

    def on_ranks(self, num_ranks: int) -> Iterable[Mapping[str, str]]:
        """Changes with which `num_ranks` ranks share what one has in memory, the plainest first; none where ranks share nothing."""
        return ()

    def with_ways(self, planned: Plan, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """`planned`; where it exceeds the memory, with those of `remedies` as ways out that lower the estimate, and how far.

        Each was planned. What is set already, what cannot be set, and what does not help is not proposed. Where no change of one field
        is enough, the first way says what is: all of them together, or as few ranks as can share the work (`on_ranks`).
        """
        before, free = planned.estimates.get(MEMORY), machine.free_memory_bytes
        if before is None or before.value <= free:
            return planned
        tried = _Tried(self, facts, machine)
        found = [
            one for one in (tried.best(values, before.value, free) for values in self.remedies()) if one is not None
        ]
        found.sort(key=lambda one: one[0] > free)
        ways = [
            f"{self._changed(changes)}: {human_bytes(needed)} instead of {human_bytes(before.value)}"
            for needed, changes in found
        ]
        first: list[str] = []
        if not any(needed <= free for needed, _ in found):
            together = {name: value for _, changes in found for name, value in changes.items()}
            enough = self._enough(tried, together, before.value, free)
            first = [f"no single change fits: {enough}"] if tried.num_plans else []
        ways = [*first, *(*ways, *planned.ways.get(MEMORY, ()))[:NUM_WAYS]]
        return planned.model_copy(update={"ways": {**planned.ways, MEMORY: tuple(ways)}})

    def _enough(self, tried: _Tried, together: Mapping[str, str], before: float, free: float) -> str:
        """What makes it fit beside changes of one field, in words."""
        least = tried.bytes(together) if len(together) > 1 else math.inf
        if least <= free:
            return f"{self._changed(together)} together do, with {human_bytes(least)}"
        lowest = min(least, before)
        for more, one in (({}, before), (together, lowest)):
            for power in range(1, MOST_RANKS.bit_length()):
                num_ranks = 1 << power
                if num_ranks <= tried.machine.num_ranks or one / num_ranks > free:  # at best each has its part of all
                    continue
                for shared in self.on_ranks(num_ranks):
                    changes = {**more, **shared}
                    needed = tried.bytes(changes, num_ranks)
                    if needed <= free:
                        return f"{num_ranks} ranks do, with {self._changed(changes)} ({human_bytes(needed)} each)"
                    lowest = min(lowest, needed)
        return f"the least of all that was tried is {human_bytes(lowest)}, and {human_bytes(max(free, 0))} are free"

    def _changed(self, changes: Mapping[str, str]) -> str:
        """'gradient_accumulation_steps 8 -> 16, optimizer adamw -> adamw_8bit'."""
        return ", ".join(f"{name} {_now(self, name)} -> {value}" for name, value in changes.items())

    def run(self, plan: Any, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Does the planned work inside `draft.folder`, resumably, and records the figures. Does not change parents.

        With `every_rank` all ranks of `run.mesh` call it; rank 0 alone writes, and its figures are recorded.
        """
        raise NotImplementedError(f"{type(self).__name__}.run")

    def make(self, out: Path | str, parents: dict[str, Artifact] | None = None, run: Run | None = None) -> Artifact:
        """Makes the artifact in folder `out`, or returns it when it is already there; resumes an interrupted one.

        With several ranks, rank 0 makes it and the others wait, or all of them work on it (`every_rank`). Raises SpecError
        for a missing or unknown role, DriftError when `out` was made from another spec, FitError when the plan exceeds the
        machine.
        """
        run, out = run or Run(), Path(out)
        if self.every_rank:
            with run.mesh.together():
                folder = self._make(out, parents or {}, _on(run.mesh, run))
        else:
            folder = run.mesh.from_leader(lambda: self._make(out, parents or {}, _on(Mesh(), run)))
        return Artifact.read(folder)

    def _make(self, out: Path, parents: dict[str, Artifact], run: Run) -> Path:
        """`make`, on all ranks of `run.mesh`: rank 0 alone opens and commits. The folder of the artifact."""
        drafts: list[Draft] = []
        self._agree(out, parents, run)

        def begin() -> Any:
            opened = self._begin(out, parents, run)
            if isinstance(opened, Artifact):
                return opened.folder
            planned, draft = opened
            drafts.append(draft)
            return planned

        begun = run.mesh.from_leader(begin)
        if isinstance(begun, Path):
            return begun
        if not drafts:  # another rank reads the folder that rank 0 locked, and commits nothing
            self.run(begun, Draft(out, {}, None, resumed=True, parents=[]), parents, run)
            return run.mesh.from_leader(lambda: out)
        with drafts[0] as draft:
            self.run(begun, draft, parents, run)
            return run.mesh.from_leader(lambda: draft.commit().folder)

    def _agree(self, out: Path, parents: dict[str, Artifact], run: Run) -> None:
        """Raises SpecError on all ranks where one was started with another version, spec, input, folder or kind of device."""
        if run.mesh.world_size == 1:
            return
        mine = {"hone": own_version(), "out": str(out.absolute()), "device": run.device.partition(":")[0]}
        mine |= {f"input {role}": parent.fingerprint for role, parent in parents.items()}
        mine |= {f"{self.stage}.{name}": value for name, value in _flat(self.model_dump(mode="json"))}
        first, *others = run.mesh.gather(mine)
        for rank, theirs in enumerate(others, 1):
            for name in dict.fromkeys([*first, *theirs]):
                if first.get(name) != theirs.get(name):
                    raise SpecError(
                        f"rank {rank} was started with {name} {theirs.get(name)}, rank 0 with {first.get(name)}",
                        fix="start the same command, with the same version of hone and the same data, on all machines",
                    )

    def _begin(self, out: Path, parents: dict[str, Artifact], run: Run) -> Artifact | tuple[Plan, Draft]:
        """The artifact in `out` if it is there, else the plan and the draft of making it."""
        self.check_roles(parents)
        inputs: dict[str, Any] = {
            "kind": self.stage,
            "spec": self,
            "parents": parents,
            "files": self.files(),
            "run": run,
        }
        there = finished(out, **inputs)
        if there is not None:
            return there
        planned = self._planned(out, parents, run)
        opened = start(out, **inputs)
        if isinstance(opened, Artifact):
            return opened
        if run.command:
            opened.command(run.command)
        # What the process takes is known when the work begins.
        opened.predict({name: estimate for name, estimate in planned.estimates.items() if name != PEAK})
        return planned, opened

    def check_roles(self, given: Mapping[str, Any]) -> None:
        """Raises SpecError unless every required role is in `given` and every given role is one of the stage's."""
        for role, required in self.roles.items():
            if required and not any(role == self._role(name) for name in given):
                raise SpecError(
                    f"{self.stage} needs the input '{role}'",
                    fix=f"name it: from: {{{role}: NAME OR FOLDER}} in a recipe, inputs={{'{role}': FOLDER}} in Python",
                )
        for role in given:
            if self._role(role) not in self.roles:
                raise SpecError(
                    f"{self.stage} has no input '{role}'",
                    fix=f"{did_you_mean(role, self.roles)}its inputs are: {', '.join(self.roles) or 'none'}",
                )

    def _planned(self, out: Path, parents: dict[str, Artifact], run: Run) -> Plan:
        """The plan of making `out`. Raises FitError when it exceeds the machine."""
        machine = resolve(MACHINE)(run)
        facts = {role: facts_of(parent) for role, parent in parents.items()}
        planned = self.full_plan(facts, machine)
        planned.must_fit(capacity(machine, out), out.name)
        return planned

    def _role(self, given: str) -> str:
        """The role of a parent given as `given`: 'data' for 'data.code' where the role takes several."""
        role, _, name = given.partition(".")
        return role if name and role in self.several else given

    def files(self) -> dict[str, Path]:
        """Fields that name files whose content is part of the identity, with their files."""
        return {}


class _Tried:
    """The memory that a stage needs with changes of its fields, planned once each."""

    def __init__(self, stage: Stage, facts: Mapping[str, Facts], machine: Machine) -> None:
        self.stage, self.facts, self.machine = stage, facts, machine
        self.num_plans = 0

    def bytes(self, changes: Mapping[str, str], num_ranks: int | None = None) -> float:
        """Bytes that a rank needs with `changes`, on `num_ranks` ranks (None: as many as there are); infinite where it cannot run."""
        machine = self.machine if num_ranks is None else self.machine.on_ranks(num_ranks)
        self.num_plans += 1
        try:
            return self.stage.override(dict(changes)).priced(self.facts, machine).estimates[MEMORY].value
        except HoneError:
            return math.inf

    def best(
        self, values: Sequence[tuple[str, str]], before: float, free: float
    ) -> tuple[float, dict[str, str]] | None:
        """(bytes, change) of the first of `values` that fits, else of the one that needs least; None where none helps."""
        best = None
        for name, value in values:
            needed = self.bytes({name: value})
            if needed < _HELPS * (before if best is None else best[0]):
                best = needed, {name: value}
            if needed <= free:
                break
        return best


def _now(spec: Any, path: str) -> Any:
    """The value of a dotted field as it is set: of a technique its name."""
    for name in path.split("."):
        spec = getattr(spec, name)
    return getattr(spec, "kind", spec)


def _on(mesh: Mesh, run: Run) -> Run:
    """The circumstances of this rank, when the ranks of `mesh` do the work."""
    machine = run.machine and {**run.machine, "num_ranks": mesh.world_size}
    return replace(run, mesh=mesh, device=mesh.place(run.device), machine=machine)


def _flat(values: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a spec, also of nested ones, by their dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{name}.")
        else:
            yield f"{head}{name}", value
