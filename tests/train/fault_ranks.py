"""What each of several ranks does in the tests of faults: trainings in which one of them computes or keeps a wrong number."""

from __future__ import annotations

from typing import Any

import torch

from hone.base.artifact import Artifact
from hone.base.errors import HoneError
from hone.base.run import Run
from hone.train.loop import Trainer
from hone.train.stage import Train


def faulty(spec: dict[str, Any], data: str, out: str, fault: str = "", rank: int = 1, at: int = 4) -> str:
    """The content of the artifact, or the error, of a training in which `rank` has a `fault` in step `at`.

    'weight': a bit of one of its weights changes after the step. 'own': it computes its own part of the batch wrong once,
    'other': another rank's part, 'always': every part from that step on.
    """
    torch.set_num_threads(1)
    run = Run()
    if run.mesh.rank == rank and fault:
        _inject(fault, at)
    try:
        return Train.read(spec).make(out, {"data": Artifact.read(data)}, run).content
    except HoneError as error:
        return str(error)


def _inject(fault: str, at: int) -> None:
    step, gradients = Trainer.step, Trainer.gradients
    calls: dict[int, int] = {}

    def flipped(self: Trainer, batch: Any) -> Any:
        made = step(self, batch)
        if self.done == at:
            weight = self.update.weights.masters[max(self.update.weights.masters)]
            weight.detach().view(-1).view(torch.int32)[5] ^= 1 << 20
        return made

    def wrong(self: Trainer, batch: Any) -> Any:
        now = self.done + 1
        calls[now] = calls.get(now, 0) + 1
        due = now >= at if fault == "always" else now == at and calls[now] == {"other": 1, "own": 2}[fault]
        layer = next(iter(self.model.layers))
        hook = layer.register_forward_hook(lambda *values: values[2] * 1.001) if due else None
        try:
            return gradients(self, batch)
        finally:
            if hook is not None:
                hook.remove()

    if fault == "weight":
        Trainer.step = flipped  # type: ignore[method-assign]
    else:
        Trainer.gradients = wrong  # type: ignore[method-assign]
