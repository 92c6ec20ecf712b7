"""What each of several ranks does in the tests of faults: trainings in which one of them computes or keeps a wrong number."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import replace
from typing import Any

import torch

from hone.base.artifact import Artifact
from hone.base.errors import ArtifactError, HoneError
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.parallel.axis import Axis
from hone.parallel.pipeline.executor import Channels
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


def killed(spec: dict[str, Any], data: str, out: str, op: str, count: int, during: bool = False, rank: int = 1) -> str:
    """As `tests.train.ranks.made`, of a training in which `rank` kills itself at call number `count` of `op` from step 3 on.

    `op` is a method of `Axis` or `Channels`, 'meeting' (of all ranks, in a step) or 'checkpoint' (a meeting while one is written). `during`: the
    transfer has begun on this rank.
    """
    torch.set_num_threads(1)
    run = Run(quiet=True)
    if run.mesh.rank == rank:
        _kill_at(op, count, during)
    try:
        return Train.read(spec).make(out, {"data": Artifact.read(data)}, run).content
    except HoneError as error:
        return str(error)


def _kill_at(op: str, count: int, during: bool) -> None:
    step, save, state = Trainer.step, Trainer.save, {"calls": 0, "in": ""}

    def stepping(self: Trainer, batch: Any) -> Any:
        state["in"] = "step" if self.done >= 2 else ""
        try:
            return step(self, batch)
        finally:
            state["in"] = ""

    def saving(self: Trainer, *arguments: Any, **more: Any) -> None:
        state["in"] = "save" if self.done > 2 else ""
        try:
            save(self, *arguments, **more)
        finally:
            state["in"] = ""

    Trainer.step, Trainer.save = stepping, saving  # type: ignore[method-assign]
    owners = {
        "meeting": (Mesh, "_met"),
        "checkpoint": (Mesh, "_met"),
        "send": (Channels, "send"),
        "receive": (Channels, "receive"),
    }
    owner, name = owners.get(op, (Axis, op))
    work, inside = getattr(owner, name), "save" if op == "checkpoint" else "step"

    def counted(*arguments: Any, **options: Any) -> Any:
        state["calls"] += state["in"] == inside
        due = state["in"] == inside and state["calls"] == count
        if due and not during:
            os.kill(os.getpid(), signal.SIGKILL)
        found = work(*arguments, **options)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, counted)


def misused(spec: dict[str, Any], data: str, out: str, mistake: str, rank: int = 1) -> str:
    """As `tests.train.ranks.made`, of a training in which `rank` makes a `mistake` of `MISTAKES`."""
    torch.set_num_threads(1)
    run = Run(quiet=True)
    parents = {"data": Artifact.read(data)}
    try:
        if run.mesh.rank == rank:
            spec, parents, run = MISTAKES[mistake](spec, parents, run)
        return Train.read(spec).make(out, parents, run).content
    except HoneError as error:
        return str(error)


def refused(specs: list[dict[str, Any]], data: str, out: str) -> list[str]:
    """The errors of trainings of `specs`, one after the other; what begins counts as none."""
    torch.set_num_threads(1)
    found = []
    for number, spec in enumerate(specs):
        try:
            Train.read(spec).make(f"{out}-{number}", {"data": Artifact.read(data)}, Run(quiet=True))
            found.append("")
        except HoneError as error:
            found.append(str(error))
    return found


def early(what: str) -> str:
    """The error on this rank of two when rank 1 alone has the error `what` before the ranks meet."""
    mesh = Mesh.from_environment()
    try:
        if mesh.rank == 1:
            known = mesh.tell(ArtifactError(what, fix="copy it"))
            return f"told {known}"
        with mesh.together():
            mesh.gather(1)
    except HoneError as error:
        return f"{error!s} {error.told}"
    return "no error"


def _other_version(spec: Any, parents: Any, run: Run) -> Any:
    import hone.base.stage

    hone.base.stage.own_version = lambda: "0.0.9"
    return spec, parents, run


def _full_disk(spec: Any, parents: Any, run: Run) -> Any:
    """Files of this process end at 60 kB from the second checkpoint on, as on a disk with a quota that is used up."""
    save = Trainer.save

    def limited(self: Trainer, *arguments: Any, **more: Any) -> None:
        if self.done > 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        save(self, *arguments, **more)

    Trainer.save = limited  # type: ignore[method-assign]
    return spec, parents, run


def _folder_gone(spec: Any, parents: Any, run: Run) -> Any:
    """The folder of the checkpoints is no longer there for rank 0, which makes the new one."""
    save = Trainer.save

    def without(self: Trainer, checkpoints: Any, **more: Any) -> None:
        if self.done > 1:
            checkpoints.folder = checkpoints.folder / "gone"
        save(self, checkpoints, **more)

    Trainer.save = without  # type: ignore[method-assign]
    return spec, parents, run


def _nan(spec: Any, parents: Any, run: Run) -> Any:
    objective = Trainer._objective
    Trainer._objective = lambda self, *values: objective(self, *values) * float("nan")  # type: ignore[method-assign]
    return spec, parents, run


def _data_gone(spec: Any, parents: Any, run: Run) -> Any:
    """The tokens are not there on this machine, though the folder is known."""
    from hone.feed.mix import reading

    def missing(*_: Any) -> Any:
        raise ArtifactError("tokens/train.bin is missing", fix="copy the data to all machines")

    reading.Sources = missing  # type: ignore[assignment,misc]
    return spec, parents, run


MISTAKES: dict[str, Any] = {
    "other spec": lambda spec, parents, run: ({**spec, "optimizer": {**spec["optimizer"], "lr": 2e-3}}, parents, run),
    "other layout": lambda spec, parents, run: ({**spec, "parallelism": {"data_parallel": "zero1"}}, parents, run),
    "other version": _other_version,
    "other device": lambda spec, parents, run: (spec, parents, replace(run, device="cuda")),
    "other data": lambda spec, parents, run: (
        spec,
        {"data": Artifact.read(parents["data"].folder.with_name("data-other"))},
        run,
    ),
    "data gone": _data_gone,
    "full disk": _full_disk,
    "folder gone": _folder_gone,
    "nan": _nan,
}
