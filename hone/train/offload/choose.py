"""Chooses where a training's state is, and says so: `auto` takes the fastest places that fit, the least used things leave first."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hone.base.artifact import Draft
from hone.base.errors import FitError, SpecError
from hone.base.figure import human_bytes
from hone.cost.train.figures import growth_bytes, step_seconds
from hone.cost.train.offload import DISK, MOVED, UPDATE_S, Times, places, times
from hone.cost.train.training import Training
from hone.measure.machine import Machine, describe
from hone.train.offload.rates import nearest
from hone.train.offload.techniques import Auto, Nvme, Offload, as_said, scratch_of

if TYPE_CHECKING:
    from hone.train.loop import Trainer


def chosen(work: Training, machine: Machine, precision: str) -> tuple[Training, tuple[str, ...]]:
    """`work`, which computes in `precision`, with the offload that `auto` chooses, or its own, and what a plan says of it.

    Raises FitError when host or disk have too little room for what was asked for, SpecError where its ranks cannot train so.
    """
    if isinstance(work.offload, Auto):
        return _fastest(work, work.offload, machine, precision)
    _ready(work.offload, work)
    if not work.offload.leaves:
        return work, ()
    short = _shortage(work, machine, None)
    if short:
        raise FitError(f"offload {as_said(work.offload)}: {short}", fix=_WAYS)
    return work, (_line(work, machine),)


_WAYS = (
    "set parallelism.offload.folder to a larger disk, take parallelism.offload: nvme in place of host, lower checkpoint.keep_latest_k, "
    "or train a smaller model"
)


def _ready(offload: Offload, work: Training) -> None:
    """Raises SpecError where the ranks of `work` cannot train with `offload`."""
    shards = 1 if work.divided.served else int(work.divided.of("optimizer"))  # a server's masters stay with it
    offload.ready(work.divided.num_ranks, shards)


def _refused(offload: Offload, work: Training, precision: str) -> str:
    """Why `offload` does not work with the rest of a training; ''."""
    stages = 1 if work.pipeline is None else 2
    try:
        offload.with_axes({"pipeline_parallel_degree": stages, "tensor_parallel_degree": work.tensor.degree})
        offload.fits(precision=precision, ends_early=False, copies_state=work.snapshot)
        _ready(offload, work)
    except ValueError as error:
        return str(error)
    except SpecError as error:
        return error.what
    return ""


def _fastest(work: Training, auto: Auto, machine: Machine, precision: str) -> tuple[Training, tuple[str, ...]]:
    """All on the device if it fits, else the candidate with the shortest step of those that fit; where none does, the one that needs
    least of the device."""
    room = auto.device_bytes or machine.free_memory_bytes
    found, lines = [], []
    for offload in auto.candidates():
        refused = _refused(offload, work, precision)
        if refused:
            lines += [] if refused in lines else [refused]
            continue
        one = replace(work, offload=offload)
        if isinstance(offload, Nvme) and machine.device.startswith("cuda"):  # the host's memory is faster than its disk
            spare = (
                0.9 * _host_room(auto.host_bytes) / machine.local_ranks - places(offload, one.load, machine.device).host
            )
            one = replace(work, offload=offload.model_copy(update={"host_bytes": max(int(spare), 0)}))
        needs = growth_bytes(one, machine.device).value
        short = (
            _shortage(one, machine, auto.host_bytes)
            if needs <= room
            else f"needs {human_bytes(needs)} of {human_bytes(room)}"
        )
        seconds = step_seconds(one, machine).value
        found.append((bool(short), not short and offload.leaves, needs if short else seconds, one))
        lines.append(f"offload {as_said(one.offload)}: {short or f'{seconds:.3g} s a step, {human_bytes(needs)}'}")
    *_, best = min(found, key=lambda one: one[:3])
    return best, (*lines, f"auto takes {_line(best, machine)}")


def _host_room(host_bytes: int | None) -> float:
    return host_bytes or min(describe("cpu").free_memory_bytes, psutil.virtual_memory().available)


def _shortage(work: Training, machine: Machine, host_bytes: int | None) -> str:
    """What of a GPU's host or of the disk is too small; ''."""
    if machine.elsewhere or machine.planned:
        return ""
    kept = places(work.offload, work.load, machine.device)
    if machine.device.startswith("cuda"):
        room = _host_room(host_bytes)
        host = kept.host * machine.local_ranks
        if host > room:
            return f"needs {human_bytes(host)} of the host's memory, {human_bytes(room)} are free"
    where = scratch_of(work.offload)
    if where is not None:
        folder = nearest(Path(where))
        status = os.statvfs(folder)
        free, disk = status.f_bavail * status.f_frsize, kept.disk * machine.local_ranks
        if disk > free:
            return f"needs {human_bytes(disk)} in {folder}, {human_bytes(free)} are free"
    return ""


def _line(work: Training, machine: Machine) -> str:
    """'offload nvme: optimizer state 48.0 GiB on disk, ...: predicted 2.1 s a step, of which ...'; of ranks what each has."""
    kept, found = places(work.offload, work.load, machine.device), _times(work, machine)
    each = f", of each of {machine.local_ranks} ranks on this host" if machine.local_ranks > 1 else ""
    line = f"offload {as_said(work.offload)}: {', '.join(kept.said)}{each}: predicted {step_seconds(work, machine).value:.3g} s a step"
    if found is None:
        return line
    beside = "beside the next step's passes" if not work.offload.exact else ""
    return f"{line}, its update {found.update:.3g} s {beside}".rstrip() + f" ({found.said})"


def _times(work: Training, machine: Machine) -> Times | None:
    """The update's seconds and the bytes of a step. Its passes count as nothing, so `waits` is not that of a step: nobody reads it."""
    return times(work.offload, work.load, machine, 0.0)


def record_left(draft: Draft, trainer: Trainer) -> None:
    """Records the figures of a step's offload, where something left the device and this run made an update."""
    from hone.train.offload.steps import HostSteps

    weights = trainer.update.weights
    if not isinstance(weights, HostSteps) or not weights.updates:
        return
    note = f"mean of {weights.updates} updates"
    draft.record(UPDATE_S, weights.update_s / weights.updates, "s", note=note)
    draft.record(MOVED, weights.moved() / weights.updates, "B", note="a step, between host and device")
    if weights.files is not None:
        file = weights.files.file
        waited = f"the update waited {file.io_s / weights.updates:.3g} s for it" + (
            f"; {file.note}" if file.note else ""
        )
        draft.record(DISK, (file.read_bytes + file.written_bytes) / weights.updates, "B", note=waited)
