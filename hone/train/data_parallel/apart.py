"""Steps of ranks that wait for no other rank's numbers, and the meetings after which all of them have the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.feed.load import Batch
from hone.train.checkpoint import SavedTensors
from hone.train.loop import Step, Trainer


class ApartTrainer(Trainer):
    """A `Trainer` whose losses, norms and counts are those of its own rank; after every `sync_every` steps, and the last one, all ranks meet.

    After a meeting all ranks have the same weights: there alone they evaluate, save and end together. Tokens are those of all
    ranks; between two meetings the others count as having as many as this one.
    """

    sync_every: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._counted = 0
        """Tokens of all ranks up to the last meeting."""
        self._own = 0
        """Tokens of this rank since."""

    def _over_ranks(self, sums: Tensor) -> Tensor:
        return sums

    def _of_ranks(self, numbers: Tensor) -> Tensor:
        return numbers[None]

    def meets(self, done: int) -> bool:
        """Whether all ranks meet after `done` steps."""
        return done % self.sync_every == 0 or done == self.steps

    def step(self, batch: Batch) -> Step:
        """As `Trainer.step`; then a meeting, where one is due."""
        before = self.tokens
        step = super().step(batch)
        self._own += self.tokens - before
        self.tokens = self._counted + self._own * self.ranks.mesh.world_size
        asked, self.stopping = self.stopping, False
        if self.meets(self.done):
            self._combine()
            own = torch.tensor([float(asked), self._own, *self.times.own], dtype=torch.float64)
            rows = self.ranks.mesh.every(own)
            self.times.gathered(self.done, rows[:, 2:])
            self.stopping = bool(rows[:, 0].any())
            self.tokens = self._counted = self._counted + int(rows[:, 1].sum())
            self._own = 0
        return replace(step, tokens=self.tokens)

    def _combine(self) -> None:
        """Gives all ranks the same weights, in a meeting."""

    def restore(self, stored: SavedTensors, numbers: dict[str, Any]) -> None:
        """As `Trainer.restore`, with as many ranks."""
        super().restore(stored, numbers)
        self._counted = self.tokens
