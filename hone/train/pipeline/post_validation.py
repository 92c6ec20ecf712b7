"""The optimizer's post-validation: a rank updates its stages before the global norm is known, and takes that back where it must."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.data.load import Batch
from hone.train.data_parallel.weights import DividedWeights
from hone.train.loop import Trainer
from hone.train.passes import Step, shrink


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
        lr = self.optimizer.lr * self.schedule.share(self.done, self.steps)
        rerun = self.rerun if self.rerun is not None and self.rerun.due(self) else None
        sums, counts = self.gradients(batch) if rerun is None else rerun.gradients(self, batch)
        plain = 1 / self.scaler.scale
        undo = None if self._waits else self._ahead(lr, plain)
        means = self._means(sums, counts)
        loss, norm, *extras = means.tolist()
        self.times.ends()
        norm, extra = norm / self.scaler.scale, extras[0] if extras else None
        finite = math.isfinite(norm)
        overflowed = self.scaler.enabled and not finite
        why = "" if overflowed and math.isfinite(loss) else self.spikes.judge(loss, norm)
        if self.spikes.stuck or not (why or (math.isfinite(loss) and (finite or overflowed))):
            raise self._diverged(loss, norm, lr)
        skipped = overflowed or bool(why)
        factor: float | Tensor = shrink(norm, self.max_grad_norm) / self.scaler.scale
        if not (self.scaler.enabled or self.spikes.spec):  # the bits of the loop's own step
            factor = shrink(means[1], self.max_grad_norm)
        wrong = skipped or float(factor) != plain
        if undo is not None and wrong:
            undo()
            self.taken_back += 1
        if skipped:
            self.update.weights.drop_grads()
        elif undo is None or wrong:
            self.update.apply(lr, factor)
        self._waits = wrong
        if overflowed:
            self.scaler.overflowed()
        else:
            self.scaler.passed()
        self.done += 1
        self.tokens += int(counts.tokens)
        return Step(self.done, loss, lr, norm if finite else None, self.tokens, extra, skipped=skipped, why=why)

    @torch.no_grad()
    def _ahead(self, lr: float, factor: float) -> Callable[[], None]:
        """Updates; the result takes it back, with the gradients as they were."""
        update, weights = self.update, self.update.weights
        assert isinstance(weights, DividedWeights)
        masters = {name: one.clone() for name, one in weights.masters.items()}
        states = {name: {key: one.clone() for key, one in held.items()} for name, held in update.states.items()}
        grads, count = weights.copied_grads(), update.count
        update.apply(lr, factor)

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
