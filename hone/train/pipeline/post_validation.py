"""The optimizer's post-validation: a rank updates its stages before the global norm is known, and takes that back where it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hone.feed.load import Batch
from hone.train.data_parallel.weights import DividedWeights
from hone.train.loop import Trainer
from hone.train.passes import Step, Told, shrink


class PostValidatedTrainer(Trainer):
    """A `Trainer` whose ranks update as soon as their own passes have ended (Qi et al. 2023, arXiv:2401.10241, section 4).

    Each takes for granted that nothing is clipped or skipped. When all have met and the norm is known, a step for which that is
    wrong is taken back, from copies and so to the bit, and made again as it should be. After such a step the next update waits for
    the norm, because the one after a clipped step is often clipped, too. The result is that of the synchronous update, to the bit.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self.update.weights, DividedWeights), "post-validation is for several ranks"
        self.taken_back = 0
        """Updates that were taken back."""
        self._waits = False
        """Whether the next update waits for the norm."""

    def _step(self, batch: Batch) -> Step:
        sums, counts = self._passes(batch)
        plain = 1 / self.scaler.scale
        undo = None if self._waits else self._ahead(plain)
        means = self._means(sums, counts)
        step = self._judged(Told(means), counts)
        # Of the tensor where the loop's own step takes it, for the same bits.
        norm = step.grad_norm if self.scaler.enabled or self.spikes.spec else means[1]
        factor = plain if step.skipped else shrink(norm, self.max_grad_norm) / self.scaler.scale
        wrong = step.skipped or float(factor) != plain
        if undo is not None and wrong:
            undo()
            self.taken_back += 1
        if step.skipped:
            self.update.weights.drop_grads()
        elif undo is None or wrong:
            self.update.apply(self.lr, factor)
        self._waits = wrong
        return self._ended(step)

    @torch.no_grad()
    def _ahead(self, factor: float) -> Callable[[], None]:
        """Updates; the result takes it back, with the gradients as they were."""
        update, weights = self.update, self.update.weights
        assert isinstance(weights, DividedWeights)
        masters = {name: one.clone() for name, one in weights.masters.items()}
        states = {name: {key: one.clone() for key, one in held.items()} for name, held in update.states.items()}
        grads, count = weights.copied_grads(), update.count
        update.apply(self.lr, factor)

        @torch.no_grad()
        def undo() -> None:
            for name, one in masters.items():
                weights.masters[name].copy_(one)
            for name in list(update.states):
                if name not in states:
                    del update.states[name]
                    continue
                for key, one in states[name].items():
                    update.states[name][key].copy_(one)
            update.count = count
            weights.publish(list(masters))
            weights.published()
            weights.put_grads(grads)

        return undo
