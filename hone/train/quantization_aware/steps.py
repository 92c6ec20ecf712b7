"""The steps of learned grids in a training: their update beside the weights, and the model that is saved of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hone.train.quantization_aware.linears import RoundedLinears
from hone.train.teachers.base import Tutor
from hone.train.teachers.beside import Beside

if TYPE_CHECKING:
    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Counts, Step
    from hone.train.teachers.base import Training


class Steps(Tutor):
    """The teacher `tutor` of a training whose `linears` learn their steps.

    What is trained is the logarithm of a step, so that Adam, which does not see a gradient's size, changes all of them by the same
    share. The saved model has the rounded weights, from which an exporter finds the steps again, exactly.
    """

    def __init__(self, tutor: Tutor, linears: RoundedLinears) -> None:
        self._tutor, self.decoder, self._linears = tutor, tutor.decoder, linears.linears
        logs = {}
        for number, linear in enumerate(self._linears):
            first = linear.quantizer.first_steps(linear.weight)  # type: ignore[attr-defined]
            logs[str(number)] = torch.nn.Parameter(torch.zeros_like(first))
            linear.steps = (first, logs[str(number)])  # a tuple, so that it is no parameter of the model
        self._beside = Beside(logs, "step")

    def begin(self, trainer: Training) -> None:
        self._tutor.begin(trainer)

    def look_up(self, batch: Batch, context: Context) -> None:
        self._tutor.look_up(batch, context)

    def learn(self, trainer: Training, parts: Sequence[Batch], counts: Counts) -> None:
        self._tutor.learn(trainer, parts, counts)

    def drop_grads(self) -> None:
        self._tutor.drop_grads()
        self._beside.drop_grads()

    def stepped(self, trainer: Training, step: Step) -> None:
        self._tutor.stepped(trainer, step)
        self._beside.stepped(trainer, step)

    def saving(self, save: Callable[[Path], Any]) -> Callable[[Path], Any]:
        """`save` of the rounded weights, which the training then takes back."""

        def rounded(folder: Path) -> Any:
            with torch.no_grad():
                kept = [linear.weight.clone() for linear in self._linears]
                for linear in self._linears:
                    linear.weight.copy_(linear.computed())
                try:
                    return save(folder)
                finally:
                    for linear, weight in zip(self._linears, kept, strict=True):
                        linear.weight.copy_(weight)

        return rounded

    def state(self) -> dict[str, Tensor]:
        return self._tutor.state() | self._beside.state()

    def restore(self, stored: SavedTensors) -> None:
        self._tutor.restore(stored)
        self._beside.restore(stored)


def with_steps(tutor: Tutor, linears: Any) -> Tutor:
    """`tutor`, beside the steps that the linears of a training learn, if they do."""
    learns = isinstance(linears, RoundedLinears) and linears.quantizer.learns_steps
    return Steps(tutor, linears) if learns else tutor
