"""A stage: a spec that plans and makes one artifact from others. Every verb room has one, in its `stage.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hone.base.artifact import Artifact, Draft, finished, start
from hone.base.errors import SpecError, did_you_mean
from hone.base.lazy import resolve
from hone.base.plan import Facts, Machine, Plan, capacity, facts_of
from hone.base.run import Run
from hone.base.spec import Spec

STAGES: dict[str, str] = {
    "data": "hone.data.stage:Data",
    "train": "hone.train.stage:Train",
    "compress": "hone.compress.stage:Compress",
    "eval": "hone.eval.stage:Eval",
    "serve": "hone.serve.stage:Serve",
}
"""Stage kind to the class behind it, imported on use; a recipe and the CLI look here."""

MACHINE = "hone.measure.machine:machine_of"
"""What describes the machine of a run, imported on use."""


class Stage(Spec):
    """What one stage computes. A subclass sets `stage`, `roles` and writes `plan` and `run`.

    `roles` maps each parent's role to True when it is required, False when it may be absent. A role in `several` may be
    filled by more parents than one, as ROLE.NAME.
    """

    stage: ClassVar[str]
    roles: ClassVar[dict[str, bool]] = {}
    several: ClassVar[frozenset[str]] = frozenset()

    def plan(self, facts: Mapping[str, Facts], machine: Machine) -> Plan:
        """What the stage will cost on `machine` and what it will make, from the `facts` of its parents by role.

        Needs no parent to exist, and reads none. Raises HoneError when the stage cannot be run on such parents.
        """
        raise NotImplementedError(f"{type(self).__name__}.plan")

    def run(self, plan: Any, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Does the work that `plan` planned inside `draft.folder`, resumably, and records the figures. Leaves parents alone."""
        raise NotImplementedError(f"{type(self).__name__}.run")

    def make(self, out: Path | str, parents: dict[str, Artifact] | None = None, run: Run | None = None) -> Artifact:
        """Makes the artifact in folder `out`, or returns it when it is already there; resumes an interrupted one.

        Of several ranks, rank 0 makes it and the others wait until it is whole. Raises SpecError for a missing or unknown
        role, DriftError when `out` was made from another spec, FitError when the plan says that the machine is too small.
        """
        run = run or Run()
        folder = run.mesh.from_leader(lambda: self._make(Path(out), parents or {}, run).folder)
        return Artifact.read(folder)

    def _make(self, out: Path, parents: dict[str, Artifact], run: Run) -> Artifact:
        """What `make` says, by one rank."""
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
        with opened:
            opened.predict(planned.estimates)
            self.run(planned, opened, parents, run)
            return opened.commit()

    def check_roles(self, given: Mapping[str, Any]) -> None:
        """Raises SpecError unless every required role is among `given` and the stage has a use for each."""
        for role, required in self.roles.items():
            if required and not any(role == self._role(name) for name in given):
                raise SpecError(f"a {self.stage} stage needs a '{role}'", fix=f"add {role}: NAME OR FOLDER")
        for role in given:
            if self._role(role) not in self.roles:
                raise SpecError(
                    f"a {self.stage} stage has no use for '{role}'",
                    fix=f"{did_you_mean(role, self.roles)}its inputs are: {', '.join(self.roles) or 'none'}",
                )

    def _planned(self, out: Path, parents: dict[str, Artifact], run: Run) -> Plan:
        """The plan of making `out`, checked to fit."""
        machine = resolve(MACHINE)(run)
        planned = self.plan({role: facts_of(parent) for role, parent in parents.items()}, machine)
        planned.must_fit(capacity(machine, out), out.name)
        return planned

    def _role(self, given: str) -> str:
        """The role that a parent given as `given` fills: 'data' for 'data.code' where several data are welcome."""
        role, _, name = given.partition(".")
        return role if name and role in self.several else given

    def files(self) -> dict[str, Path]:
        """Field name to a file whose content is part of the identity, beside the spec that names its path."""
        return {}
