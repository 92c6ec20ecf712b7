"""Runs any schedule: the passes of one rank in their order, with activations and gradients sent between ranks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hone.base.ranks import Late, Lost, Mesh
from hone.cost.pipeline.check import validate
from hone.cost.pipeline.table import Op, Result, Table, receiver
from hone.parallel.pipeline.weight_gradients import WeightGradients

_Channel = tuple[str, bool]
"""F or I, and whether it leads to a higher rank."""


class Channels:
    """One-way channels between the ranks of a pipeline: a process group for each kind and direction.

    On one channel a rank only sends to another one or only receives from it, so sends and receives cannot wait for each
    other in a circle, and messages arrive in the order of the sends.
    """

    def __init__(
        self, mesh: Mesh, pipelines: Sequence[Sequence[int]], device: torch.device | str, timeout_s: float = 600.0
    ) -> None:
        """Called by all ranks with the same lists; `pipelines`: the ranks of each, from its first stage on.

        A message that does not come in `timeout_s` is an error.
        """
        self.timeout_s = timeout_s
        self.ranks = next(list(ranks) for ranks in pipelines if mesh.rank in ranks)
        self.index = self.ranks.index(mesh.rank)
        kinds = [(kind, upward) for kind in ("F", "I") for upward in (False, True)]
        self._groups: dict[_Channel, Any] = {
            one: mesh.group(pipelines, device, timedelta(seconds=timeout_s)) for one in kinds
        }
        self._connected: set[tuple[int, int, str]] = set()
        self._messages: Counter[tuple[str, int, int]] = Counter()
        self.waits = mesh.waits
        mesh.at_close(lambda _: self.close())

    def connect(self, table: Table, like: Tensor) -> None:
        """Sends an element over each channel of `table` of this rank that has had no message, in one order on all ranks.

        NCCL makes a connection in the first call of either side and waits there for the other one, so two ranks that each
        begin with another channel would wait for ever.
        """
        found = set()
        for rank, ops in enumerate(table.ranks):
            for op in ops:
                to = receiver(table, op)
                if to is not None and table.place(to.stage, to.microbatch) != rank:
                    found.add((rank, table.place(to.stage, to.microbatch), to.kind))
        for source, to, kind in sorted(found - self._connected):
            if self.index in (source, to):
                x = like.new_zeros(1)
                (self.send(kind, x, to) if self.index == source else self.receive(kind, x, source)).wait()
            self._connected.add((source, to, kind))

    def send(self, kind: str, x: Tensor, to: int) -> Any:
        """Begins to send; x may not be changed before the handle's `wait` has returned."""
        group, tag = self._groups[kind, to > self.index], self._number(kind, self.index, to)
        return dist.isend(x, self.ranks[to], group=group, tag=tag)

    def receive(self, kind: str, x: Tensor, of: int) -> Any:
        group, tag = self._groups[kind, of < self.index], self._number(kind, of, self.index)
        return dist.irecv(x, self.ranks[of], group=group, tag=tag)

    def _number(self, kind: str, source: int, to: int) -> int:
        """The number of the next message of a channel. gloo delivers by it, so that none takes the place of a lost one."""
        self._messages[kind, source, to] += 1
        return self._messages[kind, source, to] % (1 << 24)

    def close(self) -> None:
        """Gives back the process groups; the connections close when no transfer and no `Mesh` has them any more."""
        self._groups.clear()


class Passes(Protocol):
    """The work of a pass, which the executor orders: the model, the microbatches and the loss are its own."""

    def __call__(self, stage: int, microbatch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(activation for the next stage, scalar whose gradient is taken too) of `stage` for the activation x of the one before.

        The first stage gets None, and the last one gives None as the activation. The scalar of the last stage is the loss,
        those of the others are losses of their own layers, or None; what is to be averaged is divided here.
        """
        ...


class Executor:
    """One rank of a pipeline: runs `passes` in the order of `table`.

    `stages` are the modules of this rank by their stage: their weights are kept in versions, and those of `linears` (by
    default the `nn.Linear` inside them) are changed when the schedule has W passes (`WeightGradients.defer`).
    `step(stage)` is the optimizer's step of an asynchronous schedule: it changes the parameters by their `grad` and clears it.
    `renew(stage)` gives them other memory with the same values, where they are views of what a step changes; by default each
    gets a copy of its own.
    """

    def __init__(
        self,
        table: Table,
        channels: Channels,
        stages: Mapping[int, nn.Module],
        passes: Passes,
        *,
        linears: Iterable[nn.Module] | None = None,
        step: Callable[[int], None] | None = None,
        renew: Callable[[int], None] | None = None,
    ) -> None:
        validate(table)
        self.table, self.channels, self.rank = table, channels, channels.index
        self.stages, self.passes, self.step, self.renew = dict(stages), passes, step, renew
        self._ops = table.ranks[self.rank]
        assert set(self.stages) >= set(table.held(self.rank)), f"rank {self.rank} needs stages {table.held(self.rank)}"
        assert table.steps == 0 or step is not None, "an asynchronous schedule needs a step"
        self._incoming = self._orders()
        self.weights = WeightGradients()
        if any(op.kind == "W" for op in self._ops):
            found = (part for module in self.stages.values() for part in module.modules())
            self.weights.defer([one for one in found if isinstance(one, nn.Linear)] if linears is None else linears)

    def run(self, like: Tensor) -> None:
        """All passes; gradients are added to the parameters' `grad`. A table of forwards alone runs without gradients.

        `like`: an empty tensor of the dtype, device and shape of the activation between two stages. Raises `Lost` when
        another rank has ended; an error inside a pass says in a note which pass it was.
        """
        run = _Run(self, like)
        run.connect()
        for index, op in enumerate(self._ops):
            try:
                with torch.set_grad_enabled(self.table.trains):
                    run.do(index, op)
            except Exception as error:
                error.add_note(f"in {op} on rank {self.rank} of schedule {self.table.name}")
                run.end()
                raise
        run.finish()
        assert not len(self.weights), "a schedule left weight gradients"

    def _orders(self) -> dict[tuple[int, str], list[Result]]:
        """What each rank sends here on each kind of channel, in the order in which it sends."""
        found: dict[tuple[int, str], list[Result]] = defaultdict(list)
        for rank, ops in enumerate(self.table.ranks):
            for op in ops:
                to = receiver(self.table, op)
                if to is not None and rank != self.rank == self.table.place(to.stage, to.microbatch):
                    found[rank, to.kind].append(to)
        return found


class _Run:
    """One run of a table: what is between its passes."""

    def __init__(self, executor: Executor, like: Tensor) -> None:
        self.of, self.table, self._like = executor, executor.table, like
        self._expected = {key: deque(order) for key, order in executor._incoming.items()}
        self._arriving: dict[Result, tuple[Tensor, Any]] = {}
        self._saved: dict[tuple[int, int], tuple[Tensor | None, Tensor | None, Tensor | None]] = {}
        self._sent: list[tuple[Tensor, Any]] = []
        """Sends under way; the tensors must live until they end."""
        self._versions = {stage: _Versions(module) for stage, module in executor.stages.items()}
        self._last = {(op.stage, op.version): index for index, op in enumerate(executor._ops) if op.kind != "S"}

    def connect(self) -> None:
        """Before the first pass: all channels of the table."""
        try:
            with self._losing(None):
                self.of.channels.connect(self.table, self._like)
        except Exception:
            self.end()
            raise

    def do(self, index: int, op: Op) -> None:
        """Runs pass `op`, number `index` of this rank."""
        versions = self._versions[op.stage]
        if op.kind == "S":
            needed = {version for (stage, version), last in self._last.items() if stage == op.stage and last > index}
            with versions.stepping(needed, self.of.renew and partial(self.of.renew, op.stage)):
                assert self.of.step is not None
                self.of.step(op.stage)
        elif op.kind == "W":
            self.of.weights.compute((op.stage, op.microbatch))
        else:
            with versions.reading(op.version):
                out = self._forward(op) if op.kind == "F" else self._backward(op)
            to = receiver(self.table, op)
            if to is not None:
                assert out is not None, f"{op} makes nothing for {to}"
                self._give(op, to, out)

    def _forward(self, op: Op) -> Tensor | None:
        x = self._take(op, Result("F", op.stage, op.microbatch)) if op.stage else None
        if x is not None and self.table.trains:
            x.requires_grad_()
        y, loss = self.of.passes(op.stage, op.microbatch, x)
        if y is not None:
            like = self._like
            assert (y.shape, y.dtype) == (like.shape, like.dtype), f"{op} makes {y.dtype} {tuple(y.shape)}"
        if self.table.trains:
            self._saved[op.stage, op.microbatch] = x, y, loss
        return None if y is None else y.detach()

    def _backward(self, op: Op) -> Tensor | None:
        x, y, loss = self._saved.pop((op.stage, op.microbatch))
        grads = [] if y is None else [(y, self._take(op, Result("I", op.stage, op.microbatch)))]
        parts = [*grads, *([] if loss is None else [(loss, None)])]
        key = op.stage, op.microbatch
        with self.of.weights.later(key) if op.kind == "I" else nullcontext():
            torch.autograd.backward([one for one, _ in parts], [grad for _, grad in parts])
        return None if x is None else x.grad

    def _give(self, op: Op, to: Result, x: Tensor) -> None:
        rank = self.table.place(to.stage, to.microbatch)
        if rank == self.of.rank:
            self._arriving[to] = x, None
            return
        with self._losing(op):
            x = x.contiguous()
            self._sent.append((x, self.of.channels.send(to.kind, x, rank)))

    def _take(self, op: Op, wanted: Result) -> Tensor:
        """The input of `op`; receives are posted in the order of the sender's sends, up to the one that is wanted."""
        source = op.stage + (-1 if wanted.kind == "F" else 1)
        rank = self.table.place(source, op.microbatch)
        with self._losing(op, rank):
            while wanted not in self._arriving:
                one = self._expected[rank, wanted.kind].popleft()
                x = torch.empty_like(self._like)
                self._arriving[one] = x, self.of.channels.receive(wanted.kind, x, rank)
            x, work = self._arriving.pop(wanted)
            if work is not None:
                with self.of.channels.waits.around(x.is_cuda):
                    work.wait()
        return x

    def end(self) -> None:
        """Lets go of everything that uses the connections, so that they close and no rank waits here for ever."""
        self.of.channels.close()
        self._sent.clear()
        self._arriving.clear()

    def finish(self) -> None:
        """Waits for the sends."""
        for x, work in self._sent:
            with self._losing(None), self.of.channels.waits.around(x.is_cuda):
                work.wait()
        self._sent.clear()

    @contextmanager
    def _losing(self, op: Op | None, source: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if op is not None and source is not None and "timed out" in str(error).lower():
                seconds = self.of.channels.timeout_s
                raise Late(
                    f"rank {self.of.rank} of the pipeline has waited {seconds:g} s for rank {source} in {op}: that rank is slower, "
                    "stands still, or its message is lost",
                    fix=f"see what rank {source} does; parallelism.pipeline_parallel_timeout_s is how long others wait for it; the "
                    "stage resumes",
                ) from None
            where = f"in {op}" if op is not None else "outside its passes"
            raise Lost.of(f"rank {self.of.rank} of the pipeline lost another one {where}", error) from None


class _Versions:
    """The weights of one stage: the newest, and older ones as long as a pass will read them."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._newest = 0
        self._old: dict[int, list[Tensor]] = {}

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Inside, the parameters have the values of `version`."""
        if version == self._newest:
            yield
            return
        newest = [one.data for one in self._parameters]
        self._put(self._old[version])
        try:
            yield
        finally:
            self._put(newest)

    @contextmanager
    def stepping(self, needed: set[int], renew: Callable[[], None] | None) -> Iterator[None]:
        """The step inside makes the next version; of the older ones those in `needed` are kept."""
        if self._newest in needed:
            # The copy is changed: what autograd saved may be a view of the memory that the forward read.
            self._old[self._newest] = [one.data for one in self._parameters]
            if renew is not None:
                renew()
            else:
                self._put([one.data.clone() for one in self._parameters])
        # A backward to come reads the version of its forward (`reading`), so autograd need not see that weights change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters)):
            yield
        self._newest += 1
        self._old = {version: kept for version, kept in self._old.items() if version in needed}

    def _put(self, values: list[Tensor]) -> None:
        for one, value in zip(self._parameters, values, strict=True):
            one.data = value
