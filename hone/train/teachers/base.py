"""The base of teachers: which model a student is compared with, and what that model does while the student trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hone.base.table import Technique

if TYPE_CHECKING:
    from torch import Tensor

    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.model.decoder import Decoder
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Counts, Step


class Training(Protocol):
    """What a teacher sees of the training of its student; `hone.train.loop.Trainer` is one."""

    model: Any
    """The student."""
    objective: Any
    optimizer: Any
    device: Any
    max_grad_norm: float
    gradient_accumulation_steps: int
    done: int
    steps: int
    scaler: Any
    ranks: Any


class Tutor:
    """A teacher in a training. This one stays as it is."""

    decoder: Decoder | None
    """Its model, whose hidden states the objective gets; None: there is none."""

    def __init__(self, decoder: Decoder | None) -> None:
        self.decoder = None if decoder is None else decoder.eval().requires_grad_(False)

    def begin(self, trainer: Training) -> None:
        """Called once, before the first step, when all of `trainer` is there."""

    def look_up(self, batch: Batch, context: Context) -> None:
        """Called before the pass over a micro-batch, which `context` is of."""

    def learn(self, trainer: Training, parts: Sequence[Batch], counts: Counts) -> None:
        """Called after the student's passes over the micro-batches of a step, before its update."""

    def drop_grads(self) -> None:
        """Called where passes were made to be compared alone: forgets the gradients that they and `learn` have made."""

    def stepped(self, trainer: Training, step: Step) -> None:
        """Called after the student's update, or where the step was skipped."""

    def saving(self, save: Callable[[Path], Any]) -> Callable[[Path], Any]:
        """What writes the trained model into a folder, from what writes its weights as they are."""
        return save

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it: names that begin with 'teacher.'."""
        return {}

    def restore(self, stored: SavedTensors) -> None:
        """Restores what `state` gave."""


class Teacher(Technique):
    """Whose distribution is p of a distillation."""

    from_parent: ClassVar[bool] = False
    """Whether it is the input 'teacher'; else it begins with the training and has the student's shape."""

    from_cache: ClassVar[bool] = False
    """Whether its predictions are on disk, in the input 'logits'."""

    has_decoder: ClassVar[bool] = True
    """Whether it is a model, whose hidden states there are; else it keeps predictions of each text."""

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        """The teacher of `model`, which has its initial weights; `given` is the input 'teacher', if it is one."""
        raise NotImplementedError
