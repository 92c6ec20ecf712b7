"""Training by gossip: after each step a rank mixes its weights with those of its neighbours alone."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.feed.load import Batch
from hone.train.data_parallel.asynchronous.beside import Beside
from hone.train.data_parallel.asynchronous.connections import Connections
from hone.train.data_parallel.asynchronous.topology import Mixed
from hone.train.data_parallel.local import LocalTrainer
from hone.train.passes import Step
from hone.train.update import Update

_STEP = struct.Struct("!q")


class GossipUpdate(Update):
    """The update of a rank of D-PSGD: `begin` sends its weights to whom they concern, `apply` mixes what came and then steps."""

    def __init__(self, own: Update, mesh: Mesh, mixed: Callable[[int, int, int], Mixed]) -> None:
        vars(self).update(vars(own))
        self._mixed, self.connections, self._waits = mixed, Connections(mesh), mesh.waits
        sizes = [one.numel() for one in own.weights.masters.values()]
        self._sent = torch.empty(sum(sizes))
        self._parts = self._sent.split(sizes)
        self._came: dict[int, Tensor] = {}
        self._moving: list[Beside] = []
        self._now = Mixed({}, ())

    def begin(self, step: int) -> None:
        """Starts to send the weights before `step` (from 0) and to receive those of the others, beside the passes."""
        at = self.connections
        self._now = self._mixed(step, at.rank, at.size)
        for part, one in zip(self._parts, self.weights.masters.values(), strict=True):
            part.copy_(one.detach().view(-1))  # from a GPU, too
        for peer in self._now.sources:
            self._came.setdefault(peer, torch.empty_like(self._sent))
        send = (Beside(partial(self._send, peer, step)) for peer in self._now.targets)
        receive = (Beside(partial(self._receive, peer, step)) for peer in self._now.sources)
        self._moving = [*send, *receive]

    def _send(self, peer: int, step: int) -> None:
        self.connections.send(peer, self.connections.to[peer], _STEP.pack(step), self._sent, "gossip")

    def _receive(self, peer: int, step: int) -> None:
        (came,) = self.connections.receive(peer, self.connections.of[peer], _STEP, self._came[peer])
        assert came == step, f"rank {peer} sent the weights of step {came} in step {step}"

    @torch.no_grad()
    def apply(self, lr: float, factor: float | Tensor, *, last: bool = True) -> None:
        """As `Update.apply`, from the mixed weights on."""
        with self._waits.around(False):
            for one in self._moving:
                one.end()
        mean = self._sent.mul_(1 - sum(self._now.sources.values()))
        for peer, share in sorted(self._now.sources.items()):
            mean.add_(self._came[peer], alpha=share)
        for part, master in zip(self._parts, self.weights.masters.values(), strict=True):
            master.view(-1).copy_(part)
        super().apply(lr, factor, last=last)


class GossipTrainer(LocalTrainer):
    """A `LocalTrainer` whose weights are mixed with those of a rank's neighbours in every step (arXiv:1705.09056, algorithm 1).

    x_i = sum_j W_ij x_j - the optimizer's step on the gradient at x_i before: weights travel beside the passes. A rank waits for
    its neighbours alone. In a meeting, all weights are averaged (arXiv:2105.09080).
    """

    outer_lr, outer_momentum = 1.0, 0.0
    mixed: ClassVar[Callable[[int, int, int], Mixed]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.ranks.mesh.world_size > 1, "gossip needs several ranks"
        self.update: GossipUpdate = GossipUpdate(self.update, self.ranks.mesh, type(self).mixed)

    def _step(self, batch: Batch) -> Step:
        self.update.begin(self.done)
        return super()._step(batch)


def gossiping(sync_every: int, mixed: Callable[[int, int, int], Mixed]) -> type[GossipTrainer]:
    """`GossipTrainer` with the numbers of its rules."""
    return type("GossipTrainer", (GossipTrainer,), {"sync_every": sync_every, "mixed": staticmethod(mixed)})
