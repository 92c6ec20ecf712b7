"""What each of several ranks does in the tests of asynchronous data parallelism."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.train.checkpoint import Checkpoints
from hone.train.data_parallel.asynchronous.ad_psgd import Averaged, PairedTrainer, PairedUpdate
from hone.train.data_parallel.asynchronous.shard import Push, Shard
from hone.train.data_parallel.asynchronous.worker import ServedTrainer
from tests.train.ranks import batch, trainer

PUSH, AVERAGE, TAKE = Shard.push, Averaged.average, PairedUpdate.take
logs: dict[int, list[Any]] = {}
"""Of each shard of this process what it did: [worker, clock, learning rate, targets, the workers whose reads were due]; of weights
that are averaged the rank whose weights came, or, where this rank makes a step or meets the others, its own."""


def _logged(self: Shard, worker: int, push: Push) -> list[int]:
    due = PUSH(self, worker, push)
    logs.setdefault(id(self), []).append([worker, push.clock, push.lr, push.weight, due])
    return due


def _logged_average(self: Averaged, other: torch.Tensor) -> None:
    with self.turn:
        AVERAGE(self, other)
        logs.setdefault(id(self), []).append(int(threading.current_thread().name.removeprefix("averages with ")))


def _logged_take(self: PairedUpdate) -> None:
    logs.setdefault(id(self.averaged), []).append(self.connections.rank)
    TAKE(self)


def worked(folder: str, out: str, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trains with each of `settings`: what this rank found. Every rank writes the weights after every step.

    `max_grad_norm`, `until`, `write` and `read` are as they are called; rank `slow` begins a step when the others are as far ahead as they may be.
    Where weights are averaged, it goes on with the passes of a step then.
    """
    torch.set_num_threads(1)
    Shard.push = _logged  # type: ignore[method-assign]
    Averaged.average, PairedUpdate.take = _logged_average, _logged_take  # type: ignore[method-assign]
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    for number, setting in enumerate(settings):
        with mesh.together():
            one = trainer(data, mesh, setting)
            one.max_grad_norm = setting.get("max_grad_norm", 0.0)
            if "read" in setting:
                one.restore(*Checkpoints(Path(setting["read"])).newest())
            paired = isinstance(one, PairedTrainer)
            if paired and setting.get("slow") == mesh.rank:
                one.gradients = partial(_late, one, one.gradients, number)  # type: ignore[method-assign]
            losses, weights = [], []
            while one.done < setting.get("until", one.steps):
                if setting.get("slow") == mesh.rank and not paired:
                    _wait_for_the_others(one)
                losses.append(one.step(batch(data, one.ranks, one.done, uneven=setting.get("uneven", False))).loss)
                dist.distributed_c10d._get_default_store().set(_after(number, mesh.rank, one.done), "")
                masters = one.update.weights.masters
                weights.append({name: part.detach().clone() for name, part in masters.items()})
            if "write" in setting:
                one.save(Checkpoints(Path(setting["write"]), mesh=mesh))
            torch.save(weights, Path(out) / f"{number}-{mesh.rank}.pt")
            servers = getattr(one.update, "servers", None)
            log = [] if servers is None else logs.pop(id(servers._shard))
            if paired:
                mesh.gather(None)  # no weights come any more
                log = logs.pop(id(one.update.averaged))
            sent = dict(one.update.connections.sent) if hasattr(one.update, "connections") else {}
            found.append({"losses": losses, "tokens": one.tokens, "sent": sent, "log": log})
            if servers is not None:
                found[-1] |= {"staleness": dict(servers.staleness), "updates": one.update.shard.count}
                found[-1]["held"] = sum(one.numel() for one in one.update.shard.weights.masters.values())
            held = weakref.ref(one.update.weights)
            del one, servers, masters
            gc.collect()
            assert held() is None, "a training that is over keeps its weights in memory"
    return found


def _wait_for_the_others(one: ServedTrainer) -> None:
    """Until every other worker has given this rank's shard the last gradient that it can give before this one's next."""
    clock, own, clocks = one.done + 1, one.ranks.mesh.rank, one.update.servers._shard.clocks
    meeting = next(step for step in itertools.count(clock) if one.meets(step))
    last, since = min(clock + one.staleness, meeting), time.monotonic()
    while min(reached for worker, reached in enumerate(clocks) if worker != own) < last:
        if time.monotonic() - since > 100:
            raise RuntimeError(f"the others do not get to clock {last}: {clocks}")
        time.sleep(0.001)


def _after(number: int, rank: int, step: int) -> str:
    """What the store of all ranks has when `rank` has made `step` with setting `number`."""
    return f"test/{number}/{rank}/{step}"


def _late(one: PairedTrainer, passes: Any, number: int, step: Any) -> Any:
    """`passes` of `step`, when every other rank has made all its steps but the one of the next meeting."""
    last = next(step for step in itertools.count(one.done + 1) if one.meets(step)) - 1
    if last > one.done:
        own, size = one.ranks.mesh.rank, one.ranks.mesh.world_size
        others = [_after(number, rank, last) for rank in range(size) if rank != own]
        dist.distributed_c10d._get_default_store().wait(others, timedelta(seconds=100))
    return passes(step)


def unserved(folder: str) -> str:
    """What this rank raises when the server in rank 1 fails in its second step, on a gradient that may be another rank's."""
    torch.set_num_threads(1)
    mesh, data = Mesh.from_environment(), PackedTokens(folder)
    try:
        with mesh.together():
            one = trainer(data, mesh, {"data_parallel": {"kind": "asp", "num_workers": mesh.world_size}, "steps": 4})
            if mesh.rank == 1:
                one.update.shard.weights.begin = _second_breaks()
            while one.done < one.steps:
                one.step(batch(data, one.ranks, one.done))
    except (HoneError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def _second_breaks() -> Any:
    calls: list[Any] = []

    def begin(buckets: Any, factor: Any) -> None:
        calls.append(buckets)
        if len(calls) == 2:
            raise ZeroDivisionError("a bug of a server")

    return begin
