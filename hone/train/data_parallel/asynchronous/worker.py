"""A training whose gradients go to a sharded parameter server, and whose weights come from it."""

from __future__ import annotations

from typing import Any

import torch

from hone.base.ranks import Mesh
from hone.feed.load import Batch
from hone.train.checkpoint import Checkpoints, SavedTensors
from hone.train.data_parallel.apart import ApartTrainer
from hone.train.data_parallel.asynchronous.connections import Connections
from hone.train.data_parallel.asynchronous.server import Servers
from hone.train.data_parallel.asynchronous.shard import Keys, Optimized, Shard, ShardUpdate, ShardWeights
from hone.train.passes import Counts, Step
from hone.train.update import Update


class ServedUpdate(Update):
    """The update of a worker: `apply` sends the gradient to all servers and takes the weights that they answer with.

    This rank is one of the servers. What is saved and restored is its shard, in parts of weights, as other techniques divide them.
    """

    def __init__(self, worker: Update, mesh: Mesh) -> None:
        vars(self).update(vars(worker))
        size = mesh.world_size
        shapes = {name: tuple(one.shape) for name, one in worker.weights.masters.items()}
        keys = Keys(shapes, {name for name, rule in worker._rules.items() if rule.reads_whole}, size)
        self.shard = ShardUpdate(worker, keys, mesh.rank)
        assert isinstance(self.shard.weights, ShardWeights)
        weights = self.shard.weights
        self._messages = torch.zeros(size, keys.slice_size)
        """By server, this worker's gradient and then the weights."""
        self._places = [keys.ranges(server) for server in range(size)]
        own, room = self._messages[mesh.rank], torch.zeros(size - 1, keys.slice_size)
        buffers = [*room[: mesh.rank], own, *room[mesh.rank :]]
        self.connections, self._waits = Connections(mesh), mesh.waits
        shard = Shard(Optimized(self.shard, weights), weights.values, buffers)
        self.servers = Servers(self.connections, shard, buffers, self._messages)
        self._server = f"server-{mesh.rank}.updates"
        self.targets, self.bound = 1.0, 0.0
        """Of the step under way: the targets of its loss, and how far behind the weights may be that it ends with."""

    @torch.no_grad()
    def apply(self, lr: float, factor: float | torch.Tensor, *, last: bool = True) -> None:
        """As `Update.apply`, at the servers: each steps on its part of the gradient times `factor`, when its rules say so."""
        masters = self.weights.masters
        names = list(masters)
        grads = dict(zip(names, self.weights.take_grads(names, factor), strict=True))
        for message, places in zip(self._messages, self._places, strict=True):
            for name, start, stop, at in places:
                message[at : at + stop - start].copy_(grads[name].view(-1)[start:stop])
        del grads
        with self._waits.around(False):
            self.servers.exchange(lr, self.targets, self.bound)
        for message, places in zip(self._messages, self._places, strict=True):
            for name, start, stop, at in places:
                masters[name].view(-1)[start:stop].copy_(message[at : at + stop - start])
        self._publish()

    def _publish(self) -> None:
        self.weights.publish(list(self.weights.masters))
        self.weights.published()

    def state(self) -> dict[str, torch.Tensor]:
        """As `Update.state`, of this rank's server; with the steps of each, which differ where they do not wait for all workers."""
        with self.servers.lock:
            found = self.shard.state()
        return found | {self._server: found["updates"].clone()}

    def pieces(self) -> dict[str, tuple[int, int]]:
        """As `Update.pieces`."""
        return self.shard.pieces()

    @torch.no_grad()
    def restore(self, stored: SavedTensors) -> None:
        """As `Update.restore`: this rank's server, and the weights of its worker."""
        with self.servers.lock:
            self.shard.restore(stored)
            if self._server in stored.labels:
                self.shard.count = int(stored.whole(self._server).item())
        for name, master in self.weights.masters.items():
            master.view(-1).copy_(stored.part(f"weight.{name}", 0, master.numel()))
        self._publish()


class ServedTrainer(ApartTrainer):
    """An `ApartTrainer` whose steps are those of a worker at parameter servers, one of which is in each rank.

    The weights after a step miss no gradient of another worker that is more than `staleness` clocks old (infinity: any), and
    before a meeting none. Each worker clips its own gradient; layers' own losses count by targets, too. Ranks on GPUs keep their
    shard and update it in the host's memory.
    """

    staleness: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.ranks.mesh.world_size > 1, "a parameter server needs several ranks"
        self.update: ServedUpdate = ServedUpdate(self.update, self.ranks.mesh)
        self.most_stale = 0
        """The most clocks by which a read of any worker was behind, up to the last meeting, as the servers' clocks say."""

    def _combine(self) -> None:
        own = max(self.update.servers.staleness)
        self.most_stale = max(self.ranks.mesh.gather(own)) if self.staleness else own

    def _step(self, batch: Batch) -> Step:
        self.update.bound = 0.0 if self.meets(self.done + 1) else self.staleness
        return super()._step(batch)

    def _divided(self, batch: Batch) -> tuple[Batch, Counts]:
        batch, counts = super()._divided(batch)
        self.update.targets = counts.targets
        return batch, counts

    def save(self, checkpoints: Checkpoints, **more: Any) -> None:
        """As `Trainer.save`, in a meeting; returns when no rank's shard is read any more, so that they may change."""
        assert self.meets(self.done), "clocks differ"
        super().save(checkpoints, **more)
        self.ranks.mesh.gather(None)

    def restore(self, stored: SavedTensors, numbers: dict[str, Any]) -> None:
        """As `Trainer.restore`, with as many ranks; returns when all have, so that servers may get gradients."""
        super().restore(stored, numbers)
        self.ranks.mesh.gather(None)


def served(sync_every: int, staleness: float) -> type[ServedTrainer]:
    """`ServedTrainer` with the numbers of its rules."""
    return type("ServedTrainer", (ServedTrainer,), {"sync_every": sync_every, "staleness": staleness})
