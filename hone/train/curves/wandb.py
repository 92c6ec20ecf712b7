"""Weights & Biases: the same curves in a run of the user's project, sent while the training runs or kept for `wandb sync`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field

from hone.base.artifact import Draft
from hone.base.durable import write_atomic
from hone.base.errors import HoneError, MissingExtra, SpecError
from hone.base.run import Run
from hone.base.spec import Spec

ID = "wandb"
"""The file in a draft's state that holds the run's id."""


class Wandb(Spec):
    """A run of Weights & Biases."""

    project: str = Field(min_length=1, description="Project of the run.")
    entity: str | None = Field(None, description="User or team that the project is of; empty: your default one.")
    name: str | None = Field(None, description="Name of the run; empty: that of the artifact.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: send nothing, keep files for `wandb sync`; empty: as WANDB_MODE says, else online."
    )

    def begin(self, draft: Draft, config: dict[str, Any], run: Run) -> WandbCurves:
        """The run of `draft`: a new one, or the one that an interrupted training began.

        `config` is what the run shows as its settings. Raises HoneError when wandb does not open it.
        """
        import wandb

        # Beside the artifact: wandb's process still writes when the artifact's files are hashed and renamed.
        path, folder = draft.state / ID, draft.target.parent
        if not path.exists():
            write_atomic(path, secrets.token_hex(4).encode())
        try:
            curves = wandb.init(
                project=self.project,
                entity=self.entity,
                name=self.name or draft.target.name,
                mode=self.mode,
                id=path.read_text(),
                resume="allow",
                dir=folder,
                config=config,
                settings=wandb.Settings(console="off", silent=True, symlink=False),
            )
        except wandb.errors.Error as error:
            raise HoneError(
                f"wandb did not open a run in project '{self.project}': {error}",
                fix="run `wandb login`, or keep the run on this machine with --wandb.mode=offline",
            ) from None
        offline = f"offline; send it with `wandb sync {folder / 'wandb'}/offline-run-*-{curves.id}`"
        run.say(f"wandb: run {curves.id} of project {self.project}, {offline if curves.offline else curves.url}")
        return WandbCurves(curves)


def check(run: Run) -> None:
    """Raises MissingExtra when `run` names a project and the package is not installed, SpecError for a wrong field."""
    if run.wandb is not None and Wandb.read(run.wandb) and find_spec("wandb") is None:
        raise MissingExtra.of("--wandb.project", "wandb", "wandb")


def opened(run: Run, draft: Draft, config: dict[str, Any]) -> tuple[WandbCurves, ...]:
    """The writer for the project that `run` names, as `Wandb.begin`; none without one."""
    return () if run.wandb is None else (Wandb.read(run.wandb).begin(draft, config, run),)


def from_options(options: Mapping[str, str]) -> dict[str, Any] | None:
    """The value of `Run.wandb` from the options `wandb.FIELD`; None without them. Raises SpecError."""
    fields = {name.removeprefix("wandb."): value for name, value in options.items() if name.startswith("wandb.")}
    if not fields:
        return None
    if "project" not in fields:
        given = ", ".join(f"--wandb.{name}" for name in fields)
        raise SpecError(f"{given} without a project", fix="add --wandb.project=NAME")
    return Wandb.from_overrides(fields).model_dump(mode="json")


class WandbCurves:
    """Adds points to an open run of wandb."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._first = run.step
        """The run's next step: points before it were sent by the process that was interrupted, and are not sent again."""
        self._last = self._first - 1

    def add(self, scalars: dict[str, float], step: int) -> None:
        """As `Curves.add`."""
        if step >= self._first:
            self._run.log(scalars, step=step)
            self._last = step

    def back(self, step: int) -> None:
        """As `Curves.back`; the steps of a run of wandb only rise: it keeps those that it has, and gets the ones after them."""
        self._first = self._last + 1

    def flush(self) -> None:
        """As `Curves.flush`: a process of wandb writes and sends by itself."""

    def close(self, *, whole: bool) -> None:
        """As `Curves.close`; waits until everything is sent."""
        self._run.finish(exit_code=0 if whole else 1)
