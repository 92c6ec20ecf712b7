"""What a training does every so many steps: checkpoints, evaluations, and checks of whether it ends early."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hone.base.artifact import Draft
from hone.base.durable import write_atomic
from hone.base.errors import SpecError
from hone.base.figure import human_seconds
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.base.spec import Circumstance, Spec
from hone.train.budget.spec import Energy
from hone.train.continuation.keep import Keep
from hone.train.continuation.start import Load
from hone.train.faults.checks import Checks
from hone.train.precision import ExportDtype

if TYPE_CHECKING:
    from hone.train.checkpoint import Checkpoints
    from hone.train.spikes.rewind import Rewind


class Checkpointing(Spec):
    """Checkpoints while the stage runs, what its finished folder keeps, and what is read of the model that it goes on from."""

    interval: Annotated[int, Circumstance()] = Field(
        100, ge=0, description="Steps between checkpoints; 0: none, so that a killed training starts over."
    )
    keep_latest_k: Annotated[int, Circumstance()] = Field(2, gt=0, description="Checkpoints kept while the stage runs.")
    async_mode: Annotated[Literal["disabled", "async"], Circumstance()] = Field(
        "disabled",
        description="async: a step waits for a copy of the state in the host's memory, which a thread then writes.",
    )
    keep: Keep = Field(Keep(), description="What stays in the finished folder.")
    export_dtype: ExportDtype | None = Field(
        None, description="Dtype of the finished weights, rounded from the float32 masters; empty: that of precision."
    )
    check: Annotated[Checks, Circumstance()] = Field(
        Checks(), description="Checks for devices that compute wrong numbers without an error."
    )
    load: Load = Field(
        "data_position",
        description="What is read of the 'model' that hone trained: weights; with data_position also the place in the same data where "
        "it ended; with optimizer the state that it kept too; with schedule also the steps done, which `steps` then counts.",
    )

    @property
    def exact(self) -> bool:
        """Whether nothing here changes what is made: only then is it no part of a training's identity."""
        return self.keep == Keep() and self.load == "data_position" and self.export_dtype is None

    @property
    def intervals(self) -> dict[str, int]:
        """Steps after which something is saved, by field."""
        return {"checkpoint": self.interval, "checkpoint.keep": self.keep.interval}

    def opened(self, folder: Path, mesh: Mesh) -> Checkpoints:
        """The checkpoints in `folder` of the ranks of `mesh`."""
        from hone.train.checkpoint import Checkpoints

        return Checkpoints(folder, self.keep_latest_k, mesh, background=self.async_mode == "async")

    def fits(self, rewind: Rewind | None, *, exact: bool) -> None:
        """Raises ValueError when a training cannot go back to these checkpoints as `rewind` asks, or `check` cannot compare its ranks,
        which are `exact` or not."""
        if self.check.any and not exact:
            raise ValueError(
                "checkpoint.check works where ranks have the same weights and exact sums: take ddp or zero1 to zero3"
            )
        if rewind is not None:
            rewind.check(self.interval, keeps_best=self.keep.best)

    def kept(self, steps: int, rewind: Rewind | None) -> int:
        """Checkpoints on disk at once, at most, of a training of `steps`, with those that `rewind` may go back to."""
        saved = (steps - 1) // self.interval if self.interval else 0
        older = 0 if rewind is None else 2 + self.keep_latest_k * self.interval // rewind.steps
        return min(saved + bool(older), self.keep_latest_k + 1 + older)


class EarlyStopping(Spec):
    """When a training ends before its last step."""

    val_loss: float | None = Field(
        None, gt=0, description="End at the first check with at most this loss on the val split, in nats/token."
    )
    max_time_s: float | None = Field(
        None,
        gt=0,
        description="End after this many seconds of training, however slow the machine is; several ranks at the next check.",
    )
    interval: int = Field(20, gt=0, description="Steps between checks.")
    energy: Annotated[Energy, Circumstance()] = Field(
        Energy(), description="A budget of joules, and the hours in which it runs."
    )

    @property
    def every(self) -> int:
        """Steps between checks; 0 where there are none."""
        return self.interval if self.val_loss or self.max_time_s else 0

    def notes(self, steps: int) -> tuple[str, ...]:
        """What a plan of `steps` says about it."""
        ends = [f"at a validation loss of {self.val_loss:g}"] if self.val_loss else []
        ends += [f"after {human_seconds(self.max_time_s)}"] if self.max_time_s else []
        return (f"ends {' or '.join(ends)}, if that is before step {steps}",) if ends else ()

    @property
    def evaluates_every(self) -> int:
        """Steps between the evaluations that it needs; 0: none."""
        return self.interval if self.val_loss else 0

    def check(self, val_sequences: int) -> None:
        """Raises SpecError when a loss is asked for and there is no val split."""
        if self.val_loss and not val_sequences:
            raise SpecError(
                "early_stopping.val_loss needs a val split, and the data has none",
                fix="make the data with a validation_fraction, or set early_stopping.max_time_s alone",
            )


class Stop:
    """The early end of one training. All ranks ask; rank 0 knows the time, and stores the step at which it ended.

    A run that was killed after that step ends at it again, however long it took to resume.
    """

    def __init__(self, when: EarlyStopping, draft: Draft, run: Run) -> None:
        self.when, self._draft, self._run = when, draft, run
        self._path = draft.state / "ended"
        self._ended: dict[str, int | str] | None = run.mesh.from_leader(self._stored)

    def _stored(self) -> dict[str, int | str] | None:
        return json.loads(self._path.read_text()) if self._path.exists() else None

    @property
    def said(self) -> str:
        """Why the training ended early; '' if it did not."""
        return str(self._ended["why"]) if self._ended else ""

    def over(self, done: int) -> bool:
        """Whether the time is over after `done` steps."""
        if self._ended is not None:
            return done == self._ended["step"]
        if self.when.max_time_s is None or (self._run.mesh.world_size > 1 and done % self.when.interval):
            return False  # between checks ranks do not wait for each other's answer
        spent = self._run.mesh.from_leader(lambda: self._draft.elapsed_s)
        if spent < self.when.max_time_s:
            return False
        before = f", before the validation loss was {self.when.val_loss:g}" if self.when.val_loss else ""
        return self._end(done, f"{human_seconds(self.when.max_time_s)} were over{before}")

    def reached(self, done: int, loss: float) -> bool:
        """Whether `loss`, on the val split after `done` steps, is low enough."""
        if (
            self._ended is not None
            or self.when.val_loss is None
            or done % self.when.interval
            or loss > self.when.val_loss
        ):
            return False
        return self._end(done, f"the validation loss came down to {self.when.val_loss:g}")

    def _end(self, done: int, why: str) -> bool:
        self._ended = {"step": done, "why": why}
        self._run.say(f"ended at step {done}: {why}")
        if self._run.mesh.leads:
            write_atomic(self._path, json.dumps(self._ended).encode())
        return True


class Validation(Spec):
    """How often the loss on the val split is computed, and on how much of it."""

    interval: Annotated[int, Circumstance()] = Field(
        0, ge=0, description="Steps between evaluations on the val split; 0: only at the end."
    )
    sequences: int = Field(64, ge=0, description="Sequences of the val split in an evaluation; 0: all.")
    samples: int = Field(
        0, ge=0, le=64, description="Held-out sequences whose beginnings the model continues at each evaluation."
    )
    sample_tokens: int = Field(48, gt=0, description="Most tokens of a sample.")

    def times(self, steps: int, also: Sequence[int]) -> int:
        """Evaluations in `steps`, and of those of `also` as in `total`: the last step has one."""
        return 1 + len({step for every in (self.interval, *also) if every for step in range(every, steps, every)})

    def sample_passes(self, steps: int, also: Sequence[int]) -> int:
        """Passes over one sequence that write the samples of all evaluations, a token each; fewer where texts end before."""
        return self.times(steps, also) * self.samples * self.sample_tokens

    def total(self, steps: int, val: Sequence[int], *, mixed: bool, also: Sequence[int], first: int = 0) -> int:
        """Sequences of all evaluations in `steps`, whose data have `val` sequences each; `mixed`: by a mixture; `also`: steps
        between evaluations beside those of `interval`, 0 for none; `first`: evaluations before the first step."""
        evaluated = min(sum(val), self.sequences or sum(val))
        evaluations = self.times(steps, also) + first
        if len(val) > 1:  # the sources of a mixture are also evaluated one by one
            by_source = sum(min(rows, self.sequences or rows) for rows in val)
        else:
            by_source = evaluated if mixed else 0
        return evaluations * evaluated + by_source
