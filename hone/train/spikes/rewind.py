"""Rewind: at a spike of the loss a training goes back to a checkpoint from before it, and leaves out the batches since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from pydantic import Field

from hone.base.errors import HoneError, SpecError
from hone.train.spikes.skip_step import SkipStep

if TYPE_CHECKING:
    from hone.train.checkpoint import Checkpoints
    from hone.train.passes import Step


class Rewind(SkipStep):
    """Goes back to a checkpoint at least `steps` before a spike and reads on after the batches that led to it, and `leave_out` more.

    PaLM, arXiv:2204.02311, section 5.1: back about 100 steps, 200 to 500 batches left out; the same batches at another state of the
    weights did no harm there. What a spike is, `SkipStep` says; this helps where the steps before it have done the harm
    already. Steps and learning rates are counted as if the left out ones had not been, so as many are made.
    """

    field: ClassVar[str] = "rewind"

    steps: int = Field(
        100, ge=1, description="Steps to go back at least; checkpoints of every multiple of it are there to go back to."
    )
    leave_out: int = Field(100, ge=0, description="Batches to leave out after the one of the spike.")
    max_rewinds: int = Field(
        10, ge=1, description="Times to go back; at a further spike the training ends as diverged."
    )

    @property
    def spare(self) -> int:
        """Batches that may be left out in all."""
        return self.max_rewinds * (2 * self.steps + self.leave_out)

    def check(self, interval: int, *, keeps_best: bool) -> None:
        """Raises ValueError when checkpoints are not there every `interval` steps to go back to, or the best model is kept."""
        if not interval or self.steps % interval:
            raise ValueError(
                f"optimizer.rewind.steps {self.steps} is no multiple of checkpoint.interval {interval}, whose checkpoints it goes "
                "back to"
            )
        if keeps_best:
            raise ValueError(
                "checkpoint.keep.best does not work with optimizer.rewind: the best model may be one it left"
            )

    def target(self, step: int, floor: int) -> int:
        """The step after which the state is the one to go back to from a spike in `step`; none is before `floor`."""
        return max((step - self.steps) // self.steps * self.steps, floor)


class Rewound(NamedTuple):
    """How often a training went back."""

    floor: int
    """Its first step, then the one that it went back to last: it never goes back further."""
    left_out: int = 0
    """Batches left out."""
    count: int = 0


class Watching(Protocol):
    """Of a `Watch`, what is called when a training goes back."""

    def rewound(self, row: dict[str, Any], tokens: int) -> None:
        """Drops the lines from `row`'s step on and writes `row`; `tokens` were read up to then."""


class Training(Protocol):
    """Of a `Trainer`, what goes back."""

    done: int
    tokens: int
    rewound: Rewound | None

    def save(self, checkpoints: Checkpoints) -> None:
        """As `Trainer.save`."""

    def restore(self, stored: Any, numbers: dict[str, Any]) -> None:
        """As `Trainer.restore`."""


class Rewinder:
    """Takes `trainer` back. All ranks make one, with their `checkpoints`, and call it at the same steps.

    A state to go back to depends on the spike's step alone, never on which checkpoints happen to be there, and those after it are
    deleted: a killed training that resumes meets the same spike again, or resumes after it, and ends with the same bytes.
    """

    def __init__(self, spec: Rewind, trainer: Training, checkpoints: Checkpoints | None) -> None:
        if checkpoints is None:
            raise SpecError("optimizer.rewind needs checkpoints to go back to", fix="give fit() checkpoints")
        self.spec, self.trainer, self.checkpoints = spec, trainer, checkpoints
        checkpoints.stays = self._stays
        if trainer.rewound is None:
            trainer.rewound = Rewound(trainer.done)
            trainer.save(checkpoints)

    def _stays(self, step: int, oldest: int) -> bool:
        """Whether the checkpoint of `step` is needed, of a training that may resume at `oldest` or later."""
        assert self.trainer.rewound is not None, "set at the start"
        floor = self.trainer.rewound.floor
        return step >= self.spec.target(oldest, floor) and (step % self.spec.steps == 0 or step == floor)

    def back(self, step: Step, watch: Watching | None) -> None:
        """Goes back from `step`, which is a spike. Raises HoneError when it did so too often, ArtifactError for a damaged checkpoint."""
        before, spec = self.trainer.rewound, self.spec
        assert before is not None, "set at the start"
        if before.count == spec.max_rewinds:
            raise HoneError(
                f"training diverged at step {step.step} after {before.count} rewinds: {step.why}",
                fix="lower optimizer.lr, lengthen schedule.warmup or raise optimizer.rewind.max_rewinds",
            )
        to = spec.target(step.step, before.floor)
        left = step.step - to + spec.leave_out
        self.checkpoints.drop_after(to)
        self.trainer.restore(*self.checkpoints.of(to))
        self.trainer.rewound = Rewound(to, before.left_out + left, before.count + 1)
        if watch is not None:
            first = to + before.left_out + 1
            batches = {"first_left_out": first, "last_left_out": first + left - 1}
            rewound = {"from": step.step, "to": to, **batches, "why": step.why}
            watch.rewound({"step": to + 1, "rewound": rewound}, self.trainer.tokens)
