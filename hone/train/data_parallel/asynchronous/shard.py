"""One server's part of the weights, the clocks of all workers, and who may read it: the rules of BSP, SSP and ASP, without processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hone.train.data_parallel.flat import Flat, WeightRange
from hone.train.update import Update
from hone.train.weights import Weights, scaled


class Push(NamedTuple):
    """What comes with a worker's gradient."""

    clock: int
    """Its number among this worker's gradients, from 1."""
    lr: float
    weight: float
    """The targets over which its loss is a mean."""
    bound: float
    """The worker's next read may miss gradients of others up to so many clocks before this one; infinity: any."""


class Keys:
    """Which server holds which elements of the weights of `shapes`: contiguous parts of equal size.

    Weights in `whole` are held by one server each, the largest first by the emptiest, because their rule needs whole matrices.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], whole: Collection[str], num_servers: int) -> None:
        cut = {name: shape for name, shape in shapes.items() if name not in whole}
        uncut = {name: shape for name, shape in shapes.items() if name in whole}
        self.shapes = dict(shapes)
        self._flats = Flat(cut, num_servers, whole=False), Flat(uncut, num_servers, whole=True)
        self.slice_size = sum(one.slice_size for one in self._flats)
        """Elements of a server, with padding."""

    def ranges(self, server: int) -> list[WeightRange]:
        """What `server` holds, and where in its slice."""
        first, second = self._flats
        moved = (part._replace(at=part.at + first.slice_size) for part in second.ranges(server))
        return [*first.ranges(server), *moved]


class ShardWeights(Weights):
    """The float32 weights of one server, `values` [slice_size] on the CPU, and the gradient of its next step."""

    def __init__(self, keys: Keys, server: int, given: Mapping[str, Tensor], zeros: Mapping[str, Tensor]) -> None:
        self.split, self.parameters = False, {}
        self.values = torch.zeros(keys.slice_size)
        self.gradient: Tensor | None = None
        """Laid out as `values`."""
        self.masters, self.pieces, self.zeros = {}, {}, {}
        self._at: dict[str, slice] = {}
        for name, start, stop, at in keys.ranges(server):
            self._at[name] = slice(at, at + stop - start)
            self.pieces[name] = (start, stop)
            entire = stop - start == math.prod(keys.shapes[name])
            part = self.values[self._at[name]]
            self.masters[name] = part.view(keys.shapes[name]) if entire else part
            part.copy_(given[name].detach().reshape(-1)[start:stop])
            if name in zeros:
                self.zeros[name] = zeros[name].cpu().reshape(-1)[start:stop].view(self.masters[name].shape)

    def grad(self, name: str) -> Tensor:
        """As `Weights.grad`, of this server's piece."""
        assert self.gradient is not None, "no gradient has come"
        return self.gradient[self._at[name]].view(self.masters[name].shape)

    def take_grads(self, names: Sequence[str], factor: float | Tensor | None) -> list[Tensor]:
        """As `Weights.take_grads`."""
        return scaled([self.grad(name) for name in names], factor)

    def rounded(self, name: str) -> None:
        """Nowhere: workers round what they read."""
        return

    def drop_grads(self, names: Sequence[str] | None = None) -> None:
        """As `Weights.drop_grads`, of all."""
        self.gradient = None

    def published(self) -> None:
        """After an update: forgets its gradient."""
        self.gradient = None


class ShardUpdate(Update):
    """The optimizer of one server: `worker`'s, on the CPU, for the elements that the server holds."""

    def __init__(self, worker: Update, keys: Keys, server: int) -> None:
        self.parameters, self.groups, self.on_host = worker.parameters, worker.groups, False
        self._rules, self.cuts, self.cut_index = worker._rules, {}, 0
        self._part_of = lambda _: None
        self.weights = ShardWeights(keys, server, worker.weights.masters, worker.weights.zeros)
        self.states, self.count = {}, 0


class Steps(Protocol):
    """What a shard does with the gradients of its workers."""

    def step(self, gradient: Tensor, lr: float) -> None:
        """An optimizer step on the mean `gradient` [slice_size], which may be overwritten."""


class Optimized:
    """`Steps` of a `ShardUpdate`."""

    def __init__(self, update: ShardUpdate, weights: ShardWeights) -> None:
        self._update, self._weights = update, weights

    def step(self, gradient: Tensor, lr: float) -> None:
        """As `Steps.step`."""
        self._weights.gradient = gradient
        self._update.apply(lr, 1.0)


class Shard:
    """The protocol of a server: `push` takes a gradient and says whose reads are due, of `values` [slice_size].

    Clock c of a worker is its c-th gradient. A worker that has pushed clock c reads next, and may when every worker has pushed
    clock c - bound: with bound 0 all gradients of the clock are there (BSP), with s the slowest worker is at most s clocks
    behind (SSP, Ho et al. 2013: whoever reads sees all gradients up to clock c - s, and of later ones those that have come), with
    infinity nobody waits (ASP). Gradients that have come are applied when somebody may read, in one optimizer step: k of n
    workers' gradients as their mean by targets, added in the order of the workers, with k / n of the learning rate, so that a
    clock moves the weights as far in however many steps. With bound 0 it is one step a clock, whoever comes first: the same bits.

    A worker has one gradient here at a time, in its buffer [slice_size], into which the weights are copied when its read is due.
    """

    def __init__(self, steps: Steps, values: Tensor, buffers: Sequence[Tensor]) -> None:
        self._steps, self._values, self._buffers = steps, values, buffers
        self.clocks = [0] * len(buffers)
        """Of each worker, the gradients that have come."""
        self.seen: list[tuple[int, ...]] = [tuple(self.clocks)] * len(buffers)
        """Of each worker, the clocks of all when it last read."""
        self._pending: dict[int, Push] = {}
        self._waiting: dict[int, float] = {}

    def waits(self, worker: int) -> bool:
        """Whether the read of `worker` is not due yet."""
        return worker in self._waiting

    @torch.no_grad()
    def push(self, worker: int, push: Push) -> list[int]:
        """Takes the gradient in the buffer of `worker`; the workers whose buffers now have the weights."""
        assert push.clock == self.clocks[worker] + 1, (
            f"clock {push.clock} of worker {worker} after {self.clocks[worker]}"
        )
        self.clocks[worker] = push.clock
        self._pending[worker], self._waiting[worker] = push, push.bound
        slowest = min(self.clocks)
        due = [one for one, bound in self._waiting.items() if self.clocks[one] - slowest <= bound]
        if due:
            self._apply()
        for one in due:
            del self._waiting[one]
            self._buffers[one].copy_(self._values)
            self.seen[one] = tuple(self.clocks)
        return due

    def _apply(self) -> None:
        """One optimizer step on the gradients that have come since the last one."""
        came = sorted(self._pending.items())
        self._pending = {}
        targets = sum(push.weight for _, push in came)
        total = self._buffers[came[0][0]].mul_(came[0][1].weight / targets)
        for worker, push in came[1:]:
            total.add_(self._buffers[worker], alpha=push.weight / targets)
        self._steps.step(total, sum(push.lr for _, push in came) / len(self._buffers))
