"""A parameter server inside a rank: a thread for each other worker, all at one shard, and this rank's side of all servers."""

from __future__ import annotations

import struct
import threading
from collections import Counter

from torch import Tensor

from hone.base.ranks import Lost
from hone.train.data_parallel.asynchronous.connections import Connections
from hone.train.data_parallel.asynchronous.shard import Push, Shard

_PUSH = struct.Struct("!qddd")


class Servers:
    """This rank as a server of `shard` and as a worker at the servers of all ranks.

    `messages` [ranks, slice_size], row r is what goes to and comes from server r; `buffers` are the shard's. Threads never hold the
    shard while they send or receive, and a worker sends all its gradients before it reads, so that none waits for one that waits.
    """

    def __init__(self, connections: Connections, shard: Shard, buffers: list[Tensor], messages: Tensor) -> None:
        self._connections, self._shard, self._buffers = connections, shard, buffers
        self._messages = messages
        self._turn = threading.Condition()
        self._failed: BaseException | None = None
        self._clocks = struct.Struct(f"!{connections.size}q")
        self.clock = 0
        """Gradients that this worker has sent."""
        self.staleness: Counter[int] = Counter()
        """How often a read was behind by so many clocks: this worker's own minus that of the slowest one at any server."""
        for worker in connections.of:
            threading.Thread(target=self._serve, args=(worker,), name=f"serves {worker}", daemon=True).start()

    @property
    def lock(self) -> threading.Condition:
        """To be held where the shard is read or changed otherwise."""
        return self._turn

    def exchange(self, lr: float, weight: float, bound: float) -> None:
        """Sends the gradient in `messages` to all servers, and receives their weights in its place.

        Raises `Lost`, or the error of this rank's own server that was the cause.
        """
        try:
            self._exchange(lr, weight, bound)
        except Lost:
            if self._failed is None or isinstance(self._failed, Lost):
                raise
            raise self._failed from None

    def _exchange(self, lr: float, weight: float, bound: float) -> None:
        at, rank, size = self._connections, self._connections.rank, self._connections.size
        self.clock += 1
        push = Push(self.clock, lr, weight, bound)
        peers = [(rank + step) % size for step in range(1, size)]
        for peer in peers:
            at.send(peer, at.to[peer], _PUSH.pack(*push), self._messages[peer], "push")
        slowest = min(self._pushed(rank, push))
        for peer in peers:
            clocks = at.receive(peer, at.to[peer], self._clocks, self._messages[peer])
            slowest = min(slowest, *(int(one) for one in clocks))
        self.staleness[self.clock - slowest] += 1

    def _pushed(self, worker: int, push: Push) -> tuple[int, ...]:
        """Gives the gradient in its buffer to the shard; when the weights are there in its place, the clocks that they have."""
        with self._turn:
            self._shard.push(worker, push)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._failed is not None or not self._shard.waits(worker))
            if self._failed is not None:
                raise self._failed
            return self._shard.seen[worker]

    def _serve(self, worker: int) -> None:
        at, on = self._connections, self._connections.of[worker]
        try:
            while True:
                clock, lr, weight, bound = at.receive(worker, on, _PUSH, self._buffers[worker])
                seen = self._pushed(worker, Push(int(clock), lr, weight, bound))
                at.send(worker, on, self._clocks.pack(*seen), self._buffers[worker], "pull")
        except BaseException as error:  # raised again where this rank's own worker waits
            with self._turn:
                self._failed = self._failed or error
                self._turn.notify_all()
            if not isinstance(error, Lost):
                at.close()
