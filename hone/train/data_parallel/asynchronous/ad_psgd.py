"""Training by AD-PSGD: a rank's weights are averaged with one neighbour's at a time, beside its passes, and no rank waits for passes of another."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hone.base.ranks import Lost, Mesh
from hone.feed.load import Batch
from hone.train.checkpoint import SavedTensors
from hone.train.data_parallel.asynchronous.beside import Beside
from hone.train.data_parallel.asynchronous.connections import Connections
from hone.train.data_parallel.local import LocalTrainer
from hone.train.passes import Step
from hone.train.update import Update

_STEP = struct.Struct("!q")


class Averaged:
    """A rank's weights, `values` [N] float32 in the host's memory, apart from those with which its passes compute.

    Whoever reads and then changes them holds `turn`, but does not send or receive meanwhile.
    """

    def __init__(self, values: Tensor) -> None:
        self.values, self.turn = values, threading.RLock()

    def average(self, other: Tensor) -> None:
        """Sets these weights and `other` [N] to the mean of both, at once: their sum stays, up to rounding."""
        with self.turn:
            other.add_(self.values).mul_(0.5)
            self.values.copy_(other)


class Answers:
    """What a passive rank does: in a thread for each active neighbour, averages the weights that come with `own` and sends the mean back.

    It answers whatever its rank computes meanwhile, and waits for no rank but the one that sends. An active rank waits for one
    answer at a time and answers nobody, so that no ranks wait for each other (Lian et al. 2018, section 4.3).
    """

    def __init__(self, connections: Connections, own: Averaged, neighbours: Sequence[int]) -> None:
        self._connections, self._own = connections, own
        self._failed: BaseException | None = None
        for peer in neighbours:
            room = torch.empty_like(own.values)
            threading.Thread(target=self._answer, args=(peer, room), name=f"averages with {peer}", daemon=True).start()

    def check(self) -> None:
        """Raises what a thread raised, such as `Lost`."""
        if self._failed is not None:
            raise self._failed

    def _answer(self, peer: int, came: Tensor) -> None:
        at, on = self._connections, self._connections.of[peer]
        try:
            while True:
                (step,) = at.receive(peer, on, _STEP, came)
                self._own.average(came)
                at.send(peer, on, _STEP.pack(int(step)), came, "mean")
        except BaseException as error:  # raised again where this rank makes its next step
            self._failed = self._failed or error
            if not isinstance(error, Lost):
                at.close()


class PairedUpdate(Update):
    """The update of a rank of AD-PSGD: `begin` starts an averaging where the rank is active, `apply` steps from what averaging has made.

    `neighbours(rank, ranks)` are those of a bipartite graph whose sides are the even ranks, which are active, and the odd ones.
    """

    def __init__(self, own: Update, mesh: Mesh, neighbours: Callable[[int, int], Sequence[int]]) -> None:
        vars(self).update(vars(own))
        self._waits = mesh.waits
        sizes = [one.numel() for one in own.weights.masters.values()]
        self.averaged = Averaged(torch.empty(sum(sizes)))
        self._parts = self.averaged.values.split(sizes)
        self.give()
        self.connections = Connections(mesh)
        self._neighbours = sorted(neighbours(mesh.rank, mesh.world_size))
        self._active = mesh.rank % 2 == 0
        self._asked: Beside | None = None
        self._answers = Answers(self.connections, self.averaged, () if self._active else self._neighbours)

    def begin(self, step: int) -> None:
        """Where this rank is active, starts to average its weights before `step` (from 0) with a neighbour's, drawn by rank and step."""
        if self._active:
            drawn = np.random.default_rng([self.connections.rank, step]).integers(len(self._neighbours))
            self._asked = Beside(partial(self._ask, self._neighbours[drawn], step))

    def _ask(self, peer: int, step: int) -> None:
        at, values = self.connections, self.averaged.values  # which nobody else changes: this rank answers nobody
        at.send(peer, at.to[peer], _STEP.pack(step), values, "weights")
        (answered,) = at.receive(peer, at.to[peer], _STEP, values)
        assert answered == step, f"rank {peer} answered step {answered} in step {step}"

    @torch.no_grad()
    def apply(self, lr: float, factor: float | Tensor, *, last: bool = True) -> None:
        """As `Update.apply`, from the averaged weights on; no averaging sees a part of the step."""
        if self._asked is not None:
            with self._waits.around(False):
                self._asked.end()
        self._answers.check()
        with self.averaged.turn:
            self.take()
            super().apply(lr, factor, last=last)
            self.give()

    @torch.no_grad()
    def take(self) -> None:
        """Copies the averaged weights to the masters."""
        for part, master in zip(self._parts, self.weights.masters.values(), strict=True):
            master.view(-1).copy_(part)

    @torch.no_grad()
    def give(self) -> None:
        """Copies the masters to the weights that are averaged."""
        for part, master in zip(self._parts, self.weights.masters.values(), strict=True):
            part.copy_(master.detach().view(-1))  # from a GPU, too


class PairedTrainer(LocalTrainer):
    """A `LocalTrainer` whose weights are averaged with those of one neighbour at a time (arXiv:1710.06952, algorithm 1).

    A step of rank i: x_i and x_j become their mean, with a random neighbour j, while the gradient at x_i before is computed; then
    the optimizer's step on this gradient, from the x_i that there is by now. Active ranks draw j, once a step; passive ones are
    drawn, any number of times a step. Only in a meeting a rank waits for steps of others: there all weights are averaged.
    """

    outer_lr, outer_momentum = 1.0, 0.0
    neighbours: ClassVar[Callable[[int, int], Sequence[int]]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.ranks.mesh.world_size > 1, "ad_psgd needs several ranks"
        self.update: PairedUpdate = PairedUpdate(self.update, self.ranks.mesh, type(self).neighbours)

    def _step(self, batch: Batch) -> Step:
        self.update.begin(self.done)
        return super()._step(batch)

    def _combine(self) -> None:
        self.ranks.mesh.gather(None)  # every active rank has come here with its last answer: no averaging is under way
        with self.update.averaged.turn:  # those of ranks that leave first wait for this one's new weights
            self.update.take()
            super()._combine()
            self.update.give()

    def restore(self, stored: SavedTensors, numbers: dict[str, Any]) -> None:
        """As `LocalTrainer.restore`; returns when all ranks have, so that weights may be averaged."""
        super().restore(stored, numbers)
        self.update.give()
        self.ranks.mesh.gather(None)


def paired(sync_every: int, neighbours: Callable[[int, int], Sequence[int]]) -> type[PairedTrainer]:
    """`PairedTrainer` with the numbers of its rules."""
    return type("PairedTrainer", (PairedTrainer,), {"sync_every": sync_every, "neighbours": staticmethod(neighbours)})
