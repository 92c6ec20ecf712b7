"""A student that learns from the average of its own weights over the last steps."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hone.base.lazy import lazy
from hone.train.teachers.base import Teacher, Training, Tutor

if TYPE_CHECKING:
    from torch import Tensor

    from hone.model.decoder import Decoder
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Step

torch = lazy("torch")

_HEAD = "teacher.weight."
"""Of names in a checkpoint; the weights of the student are there under their own."""


class MovingAverage(Teacher):
    """The exponential moving average of the student's weights (mean teacher). Tarvainen and Valpola 2017, arXiv:1703.01780."""

    paper: ClassVar[str] = "arXiv:1703.01780"
    decay: float = Field(
        0.999, gt=0, lt=1, description="Share of the average that stays after a step; less in the first steps."
    )

    def tutor(self, model: Decoder, given: Decoder | None) -> Tutor:
        return Averaged(model, self.decay)


class Averaged(Tutor):
    """The average, in float32, and a decoder with it in the dtype of the training.

    After step t, from 1, the share that stays is min(decay, (1 + t) / (10 + t)), so that the initial weights are soon forgotten.
    """

    def __init__(self, model: Decoder, decay: float) -> None:
        super().__init__(copy.deepcopy(model))
        self._decay = decay
        self._average: dict[str, Tensor] = {}

    def begin(self, trainer: Training) -> None:
        assert self.decoder is not None
        self._average = {name: one.detach().float().clone() for name, one in self.decoder.named_parameters()}
        self.decoder.to(next(trainer.model.parameters()).dtype)

    def stepped(self, trainer: Training, step: Step) -> None:
        if step.skipped:
            return
        decay = min(self._decay, (1 + step.step) / (10 + step.step))
        with torch.no_grad():
            for name, weight in trainer.model.named_parameters():
                self._average[name].lerp_(weight.float(), 1 - decay)
        self._publish()

    def _publish(self) -> None:
        assert self.decoder is not None
        with torch.no_grad():
            for name, weight in self.decoder.named_parameters():
                weight.copy_(self._average[name])

    def state(self) -> dict[str, Tensor]:
        return {f"{_HEAD}{name}": one for name, one in self._average.items()}

    def restore(self, stored: SavedTensors) -> None:
        for name, one in self._average.items():
            one.copy_(stored.whole(f"{_HEAD}{name}"))
        self._publish()
