"""Training with an asynchronous pipeline schedule: the optimizer's steps lie between the passes, on each rank on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.feed.load import Batch
from hone.train.data_parallel.weights import DividedWeights
from hone.train.loop import Trainer
from hone.train.passes import Counts, Step, Sums, Told, cut


class AsynchronousTrainer(Trainer):
    """A `Trainer` whose step has several updates of each stage, by the schedule's table, and ends when all passes have ended.

    Each update takes the gradient of its own micro-batches, divided by their targets, with the learning rate of the step. No
    rank knows the other stages' gradients when it updates, so nothing is clipped; the step's norm is the root of the mean
    square over its updates. Between two steps all stages have made the same updates, so evaluations and checkpoints are those of
    one model.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        pipeline, weights = self.ranks.pipeline, self.update.weights
        assert pipeline is not None and isinstance(weights, DividedWeights), (
            "an asynchronous schedule without a pipeline"
        )
        assert not self.max_grad_norm and not self.scaler.enabled, "its norm is not known before an update"
        pipeline.step, pipeline.renew = self._updates, lambda _: weights.renew()
        table = pipeline.schedule.table(pipeline.grid.pp.size, self.gradient_accumulation_steps)
        self._num_updates = table.steps
        self._squares: list[Tensor] = []
        """The squared norms of this rank's share of the gradients of the step's updates."""

    def _step(self, batch: Batch) -> Step:
        sums, counts = self.gradients(batch)
        return self._ended(self._judged(Told(self._means(sums, counts)), counts))

    def gradients(self, batch: Batch) -> tuple[Sums, Counts]:
        """All passes and updates of a step; the sums that it returns are for its log."""
        batch, counts = self._divided(batch)
        parts = cut(batch, self.gradient_accumulation_steps)
        own = [self.objective.count(part.targets) * self.ranks.counts_tokens for part in parts]
        targets = (
            self.ranks.mesh.sum(torch.tensor(own, dtype=torch.float64)).view(self._num_updates, -1).sum(1).tolist()
        )
        each = len(parts) // self._num_updates
        shares = [
            (1 / max(targets[place // each], 1.0), self._num_updates / counts.positions) for place in range(len(parts))
        ]
        self.times.passes()
        pipeline = self.ranks.pipeline
        assert pipeline is not None
        self._squares = []
        self.update.weights.before_backward(last=False)
        found, _ = pipeline.train(self.model, parts, self.segments, self._objective, shares)
        return Sums(*found, torch.stack(self._squares).mean()), counts

    def _updates(self, stage: int) -> None:
        """The update of this rank's stage, from the gradients of its micro-batches since the last one."""
        weights = self.update.weights
        weights.before_backward(last=True)
        weights.after_backward()
        self._squares.append(weights.squared_norm())
        self.update.apply(self.lr, 1.0)
        weights.before_backward(last=False)
