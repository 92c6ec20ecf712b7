"""A stage: a spec that makes one artifact from others. Every verb room has one, in its `stage.py`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hone.base.artifact import Artifact, Draft, start
from hone.base.errors import SpecError
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


class Stage(Spec):
    """What one stage computes. A subclass sets `stage`, `roles` and writes `execute`.

    `roles` maps each parent's role to True when it is required, False when it may be absent. A role in `several` may be
    filled by more parents than one, as ROLE.NAME.
    """

    stage: ClassVar[str]
    roles: ClassVar[dict[str, bool]] = {}
    several: ClassVar[frozenset[str]] = frozenset()

    def make(self, out: Path | str, parents: dict[str, Artifact] | None = None, run: Run | None = None) -> Artifact:
        """Makes the artifact in folder `out`, or returns it when it is already there; resumes an interrupted one.

        Raises SpecError for a missing or unknown role, DriftError when `out` was made from another spec.
        """
        parents, run = parents or {}, run or Run()
        for role, required in self.roles.items():
            if required and not any(role == self._role(given) for given in parents):
                raise SpecError(f"a {self.stage} stage needs a '{role}'", fix=f"add {role}: NAME OR FOLDER")
        for role in parents:
            if self._role(role) not in self.roles:
                raise SpecError(
                    f"a {self.stage} stage has no use for '{role}'",
                    fix=f"its inputs are: {', '.join(self.roles) or 'none'}",
                )
        opened = start(out, kind=self.stage, spec=self, parents=parents, files=self.files(), run=run)
        if isinstance(opened, Artifact):
            return opened
        if run.command:
            opened.command(run.command)
        with opened:
            self.execute(opened, parents, run)
            return opened.commit()

    def _role(self, given: str) -> str:
        """The role that a parent given as `given` fills: 'data' for 'data.code' where several data are welcome."""
        role, _, name = given.partition(".")
        return role if name and role in self.several else given

    def files(self) -> dict[str, Path]:
        """Field name to a file whose content is part of the identity, beside the spec that names its path."""
        return {}

    def execute(self, draft: Draft, parents: dict[str, Artifact], run: Run) -> None:
        """Does the work inside `draft.folder`: predict, work (resumably), record. Must not touch the parents."""
        raise NotImplementedError
