"""What of a training stays in its finished folder: its best model or its last, some before it, and the state to go on from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from hone.base.artifact import Draft
from hone.base.durable import read_jsonl, write_atomic
from hone.base.errors import SpecError
from hone.base.ranks import Mesh
from hone.base.spec import Spec
from hone.cost.train.training import STATE_BYTES
from hone.model.facts import POSITION_FILE, TRAINING_STATE, Position

if TYPE_CHECKING:
    from hone.train.loop import Trainer

MODELS = "checkpoints"
"""The folder of the models that `last` keeps, step-NUMBER each."""


class Keep(Spec):
    """What of a training stays in its finished folder."""

    optimizer: bool = Field(
        False,
        description=f"The state of weights and optimizer, in {TRAINING_STATE}/: that of the last step, or of the last one before "
        "schedule wsd decays. Another training goes on from it with checkpoint.load; it may be deleted.",
    )
    best: bool = Field(
        False,
        description="The model is the one with the lowest validation loss, every `interval` steps and at the end; else the last.",
    )
    last: int = Field(
        0,
        ge=0,
        description=f"Models of every `interval` steps and of the end that stay too, in {MODELS}/step-NUMBER/: the last n.",
    )
    interval: int = Field(
        0, ge=0, description="Steps between the models among which `best` and `last` choose; 0: the end alone."
    )

    @model_validator(mode="before")
    @classmethod
    def _names_are_true(cls, values: Any) -> Any:
        """Accepts `keep: optimizer` and `keep: [optimizer, best]`."""
        names = [values] if isinstance(values, str) else values
        return dict.fromkeys(names, True) if isinstance(names, list) else values

    @model_validator(mode="after")
    def _fits_together(self) -> Keep:
        if (self.best or self.last > 1) and not self.interval:
            raise ValueError("best and last choose among models of every `interval` steps: give keep.interval")
        return self

    def check(self, val_sequences: int) -> None:
        """Raises SpecError when there is nothing by which the best can be chosen."""
        if self.best and not val_sequences:
            raise SpecError(
                "checkpoint.keep.best chooses by the loss on the val split, and the data have none",
                fix="give the data stage a val split, or keep the last models: checkpoint.keep.last",
            )

    def chooses_at(self, step: int, steps: int) -> bool:
        """Whether the model after `step` of `steps` is one of those among which it chooses."""
        return step == steps or (self.interval > 0 and step % self.interval == 0)

    @property
    def evaluates_every(self) -> int:
        """Steps between the evaluations that it needs; 0: none."""
        return self.interval if self.best else 0

    def num_states(self, steps: int) -> int:
        """States of best models on disk at once, at most, in a training of `steps`."""
        return min(2, 1 + ((steps - 1) // self.interval if self.interval else 0)) if self.best else 0

    def num_models(self, steps: int) -> int:
        """Models beside the folder's own that stay of a training of `steps`."""
        return min(self.last, 1 + ((steps - 1) // self.interval if self.interval else 0))


class Keeper:
    """Writes what `keep` says into the folder of `draft` while a training runs. All ranks of `mesh` call its methods.

    `at` is the step whose state is kept; `position` says where in schedule and data a trainer is;
    `save` writes the model of all ranks into a folder.
    """

    def __init__(
        self,
        keep: Keep,
        draft: Draft,
        mesh: Mesh,
        at: int,
        position: Callable[[Trainer], Position],
        save: Callable[[Path], Any],
    ) -> None:
        from hone.train.checkpoint import Checkpoints

        self._keep, self._folder, self._mesh, self._at = keep, draft.folder, mesh, at
        self._position, self._save_model = position, save
        self._best = Checkpoints(draft.state / "best", 1, mesh) if keep.best else None
        self.best_step: int | None = None
        """The step after which the model was that of the finished folder; None: the last one."""

    @property
    def largest_bytes(self) -> int:
        """The most bytes that the state of the best model had on disk while the stage ran."""
        return self._best.largest_bytes if self._best is not None else 0

    def begun(self, trainer: Trainer) -> None:
        """To be called before the first step: the state to keep may be the one that was read."""
        if self._keep.optimizer and trainer.done == self._at:
            self._save_state(trainer)

    def stepped(self, trainer: Trainer, val_loss: float | None) -> None:
        """To be called after every step, with the validation loss if it was computed."""
        if self._keep.optimizer and trainer.done == self._at:
            self._save_state(trainer)
        if not self._keep.chooses_at(trainer.done, trainer.steps):
            return
        if self._best is not None:
            assert val_loss is not None, "the best is chosen without a loss"
            if self._mesh.from_leader(lambda: self._is_best(trainer.done)):
                trainer.save(self._best)
        if self._keep.last:
            self._mesh.from_leader(lambda: self._make_room(trainer.done))
            self._save_model(self._folder / MODELS / f"step-{trainer.done:08d}")

    def ended(self, trainer: Trainer) -> None:
        """To be called after the last step: writes where it is, and gives `trainer` the weights of the best model."""
        if self._keep.optimizer and trainer.done < self._at:  # it ended early
            self._save_state(trainer)
        if self._mesh.leads:
            row = self._position(trainer).model_dump(mode="json")
            write_atomic(self._folder / POSITION_FILE, json.dumps(row, indent=1).encode())
        found = self._best.newest() if self._best is not None else None
        if found is not None:
            stored, numbers = found
            trainer.restore(stored, numbers)
            self.best_step = trainer.done

    def _is_best(self, step: int) -> bool:
        """Whether the validation loss after `step` is the lowest so far: of the lines of the log, which a resume cuts back."""
        rows = read_jsonl(self._folder / "steps.jsonl")
        losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
        before = [loss for one, loss in losses.items() if one < step and self._keep.chooses_at(one, step)]
        return losses[step] < min(before, default=float("inf"))

    def _make_room(self, step: int) -> None:
        """Deletes the oldest models, so that with that of `step` there are as many as stay, and what a killed run wrote after it."""
        (self._folder / MODELS).mkdir(exist_ok=True)
        there = sorted((self._folder / MODELS).glob("step-*"))
        before = [folder for folder in there if folder.name < f"step-{step:08d}"]
        for folder in [*before[: max(len(before) - self._keep.last + 1, 0)], *there[len(before) :]]:
            shutil.rmtree(folder)

    def _save_state(self, trainer: Trainer) -> None:
        from hone.train.checkpoint import Checkpoints

        place = self._position(trainer).model_dump(mode="json")
        trainer.save(Checkpoints(self._folder / TRAINING_STATE, 1, self._mesh), position=place)

    def record(self, draft: Draft) -> None:
        """Records the bytes of what is kept, and the step of the best model."""
        if self._keep.optimizer:
            files = (draft.folder / TRAINING_STATE).rglob("*")
            size = sum(path.stat().st_size for path in files if path.is_file())
            draft.record(STATE_BYTES, size, "B", note="from which another training goes on; it may be deleted")
        if self.best_step is not None:
            note = f"of those every {self._keep.interval} steps and at the end the one with the lowest validation loss"
            draft.record("best_step", self.best_step, "steps", note=note)


def newest_step(checkpoints: Path) -> int:
    """The step of the newest whole checkpoint in a folder; 0 when there is none."""
    whole = [path.parent.name for path in checkpoints.glob("step-*/numbers.json")]
    return max((int(name.removeprefix("step-")) for name in whole if not name.endswith(".partial")), default=0)
