"""Small tensors that are trained beside a model, such as learned matrices and steps: their update, and their place in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hone.train.passes import shrink

if TYPE_CHECKING:
    from hone.train.checkpoint import SavedTensors
    from hone.train.passes import Step
    from hone.train.teachers.base import Training

_BETAS = (0.9, 0.95)


class Beside:
    """`parameters` by name, float32, updated by Adam with the learning rate of the step, their gradients clipped by their own norm.

    They have the same initial values on all ranks, whose gradients are added up. `head` begins their names in checkpoints.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], head: str) -> None:
        self.parameters, self._head = dict(parameters), head
        self._adam = torch.optim.Adam(self.parameters.values(), betas=_BETAS)

    @torch.no_grad()
    def stepped(self, trainer: Training, step: Step) -> None:
        """Updates them after a step, unless that was skipped, and drops their gradients."""
        squares = torch.zeros((), dtype=torch.float64, device=trainer.device)
        for one in self.parameters.values():
            found = torch.zeros_like(one) if one.grad is None else one.grad
            one.grad = trainer.ranks.mesh.sum(found / trainer.scaler.scale)
            squares += one.grad.double().square().sum()  # type: ignore[union-attr]
        norm = squares.sqrt()
        if not step.skipped and bool(torch.isfinite(norm)):
            factor = shrink(norm, trainer.max_grad_norm)
            for one in self.parameters.values():
                one.grad *= factor
            self._adam.param_groups[0]["lr"] = step.lr
            self._adam.step()
        self._adam.zero_grad()

    def drop_grads(self) -> None:
        """Forgets their gradients."""
        self._adam.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        found = {}
        for name, one in self.parameters.items():
            found[f"{self._head}.weight.{name}"] = one.detach()
            found |= {f"{self._head}.{key}.{name}": value for key, value in self._adam.state.get(one, {}).items()}
        return found

    @torch.no_grad()
    def restore(self, stored: SavedTensors) -> None:
        """Restores what `state` gave."""
        labels = set(stored.labels)
        for name, one in self.parameters.items():
            one.copy_(stored.whole(f"{self._head}.weight.{name}"))
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{self._head}.{key}.{name}" in labels]
            values = {key: stored.whole(f"{self._head}.{key}.{name}") for key in keys}
            self._adam.state[one] = {
                key: value if key == "step" else value.to(one.device) for key, value in values.items()
            }
