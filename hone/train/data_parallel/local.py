"""Steps of a rank that trains on its own, and the outer step that combines the weights of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.train.checkpoint import Checkpoints, SavedTensors
from hone.train.data_parallel.apart import ApartTrainer


class LocalTrainer(ApartTrainer):
    """An `ApartTrainer` whose gradients stay on their rank; in every meeting all weights are combined.

    With x the last common weights, x_i rank i's, and d = x - mean(x_i), in float32: v = momentum v + d and
    x = x - lr (d + momentum v), SGD with Nesterov momentum on d (arXiv:2311.08105, algorithm 1; lr 1 and momentum 0 average the
    weights). The optimizer's state stays with its rank.
    """

    outer_lr: float
    outer_momentum: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._common = {name: master.detach().clone() for name, master in self.update.weights.masters.items()}
        self._velocity: dict[str, Tensor] = {}
        if self.outer_momentum:
            self._velocity = {name: torch.zeros_like(one) for name, one in self._common.items()}

    @torch.no_grad()
    def _combine(self) -> None:
        size, masters = self.ranks.mesh.world_size, self.update.weights.masters
        mean = self.ranks.mesh.sum(torch.cat([one.detach().reshape(-1) for one in masters.values()])).div_(size)
        at = 0
        for name, master in masters.items():
            common = self._common[name]
            change = common - mean[at : at + common.numel()].view(common.shape)
            at += common.numel()
            if self.outer_momentum:
                velocity = self._velocity[name].mul_(self.outer_momentum).add_(change)
                change = change + self.outer_momentum * velocity
            common.sub_(change, alpha=self.outer_lr)
            master.copy_(common)
        self.update.weights.publish(list(masters))
        self.update.weights.published()

    def save(self, checkpoints: Checkpoints, **more: Any) -> None:
        """As `Trainer.save`, after an outer step: rank 0 writes the common weights, every rank its optimizer's state."""
        assert self.meets(self.done), "ranks have different weights"
        rank, tensors = self.ranks.mesh.rank, {}
        for label, tensor in self.update.state().items():
            if label.startswith("weight.") or label == "updates":
                tensors |= {label: tensor} if rank == 0 else {}
            else:
                tensors[f"worker-{rank}.{label}"] = tensor
        if rank == 0:
            tensors |= {f"velocity.{name}": one for name, one in self._velocity.items()}
            tensors["rng.cpu"] = torch.get_rng_state()
        numbers = {"done": self.done, "tokens": self.tokens, "scaler": self.scaler.state(), **more}
        checkpoints.save(self.done, tensors, numbers)

    @torch.no_grad()
    def restore(self, stored: SavedTensors, numbers: dict[str, Any]) -> None:
        """As `Trainer.restore`, with as many ranks."""
        super().restore(_Own(stored, f"worker-{self.ranks.mesh.rank}."), numbers)  # type: ignore[arg-type]
        for name, master in self.update.weights.masters.items():
            self._common[name].copy_(master)
            if name in self._velocity:
                self._velocity[name].copy_(stored.whole(f"velocity.{name}"))


class _Own:
    """What one rank reads of a checkpoint: common tensors and its own, by the names of a training on one rank."""

    def __init__(self, stored: SavedTensors, head: str) -> None:
        others = ("worker-", "velocity.")
        self._labels = {one: one for one in stored.labels if not one.startswith(others)}
        self._labels |= {one.removeprefix(head): one for one in stored.labels if one.startswith(head)}
        self._stored, self.labels = stored, list(self._labels)

    def numel(self, label: str) -> int:
        return self._stored.numel(self._labels[label])

    def whole(self, label: str) -> Tensor:
        return self._stored.whole(self._labels[label])

    def cuts(self, label: str) -> list[Any]:
        return self._stored.cuts(self._labels[label])

    def part(self, label: str, *where: Any) -> Tensor:
        return self._stored.part(self._labels[label], *where)


def with_outer(trainer: type[LocalTrainer], sync_every: int, lr: float, momentum: float) -> type[LocalTrainer]:
    """`trainer` with the numbers of its outer step."""
    return type("LocalTrainer", (trainer,), {"sync_every": sync_every, "outer_lr": lr, "outer_momentum": momentum})
