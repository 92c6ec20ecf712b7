"""Learned matrices between a student's width and its teacher's, trained beside the student and not saved with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.train.teachers.base import Tutor
from hone.train.teachers.beside import Beside

if TYPE_CHECKING:
    from hone.feed.load import Batch
    from hone.model.context import Context
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Counts, Step
    from hone.train.teachers.base import Training

MATRICES = "projections"
"""Their place in a context's memo."""


class Projected(Tutor):
    """A teacher `tutor` of another width, with a matrix [teacher's width, student's] for each of the student's `layers`."""

    def __init__(
        self, tutor: Tutor, layers: Sequence[int], width: int, teacher_width: int, device: torch.device
    ) -> None:
        self._tutor, self.decoder = tutor, tutor.decoder
        draw = torch.Generator().manual_seed(0)
        self.matrices = {
            layer: torch.nn.Parameter((torch.randn(teacher_width, width, generator=draw) / width**0.5).to(device))
            for layer in layers
        }
        self._beside = Beside({str(layer): one for layer, one in self.matrices.items()}, "projection")

    def begin(self, trainer: Training) -> None:
        self._tutor.begin(trainer)

    def look_up(self, batch: Batch, context: Context) -> None:
        self._tutor.look_up(batch, context)
        context.memo[MATRICES] = self.matrices

    def learn(self, trainer: Training, parts: Sequence[Batch], counts: Counts) -> None:
        self._tutor.learn(trainer, parts, counts)

    def drop_grads(self) -> None:
        self._tutor.drop_grads()
        self._beside.drop_grads()

    def stepped(self, trainer: Training, step: Step) -> None:
        self._tutor.stepped(trainer, step)
        self._beside.stepped(trainer, step)

    def state(self) -> dict[str, Tensor]:
        return self._tutor.state() | self._beside.state()

    def restore(self, stored: SavedTensors) -> None:
        self._tutor.restore(stored)
        self._beside.restore(stored)


def projected(context: Context, layer: int, hidden: Tensor) -> Tensor:
    """The student's hidden states [..., D] of `layer` in the teacher's width, by the matrix of the layer if there is one."""
    matrix = context.memo.get(MATRICES, {}).get(layer)
    return hidden if matrix is None else hidden @ matrix.to(hidden.dtype).T
