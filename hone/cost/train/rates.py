"""Rates on which the place of a training's state depends: the link to the device, the host's update, the disk of its files."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hone.cost.files import DISK_BYTES_PER_S
from hone.cost.serve.offload import link_rate
from hone.measure.calibration import Calibration
from hone.measure.machine import Machine, describe

HOST_BYTES_PER_S = 6e9
"""Bytes a second that one thread moves between its core and memory; assumed where nothing is calibrated."""

MOST_BYTES_PER_S = 150e9
"""The same of all threads together."""

WINDOW = 1 << 24
"""Weights of a window of state that is in files: 192 MiB of AdamW's master and moments. A multiple of 2^20, so that a window of each
state begins at a page."""

BUFFERS = 3
"""Windows in memory: one is read, one computed, one written."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second."""

    link: float
    """From pinned host memory to the device, and as many back at the same time."""
    update: float
    """That a step on the host reads and writes."""
    read: float
    """From the disk's files, past the page cache, while as many are written."""
    write: float
    said: str
    """Where they come from."""


def host_rates(machine: Machine, disk: tuple[float, float] | None = None, *, files: bool = False) -> Rates:
    """The rates of `machine`. With `files`, those of a disk whose (read, write) are `disk`; None: they are assumed."""
    link, bound = link_rate(machine)
    on_gpu = machine.device.startswith("cuda")
    calibration = machine.calibration
    if on_gpu and not machine.elsewhere:
        calibration = describe("cpu").calibration
    update = min(HOST_BYTES_PER_S * machine.num_threads, MOST_BYTES_PER_S)
    said = ["the host's memory is assumed"]
    if on_gpu and machine.elsewhere:  # its threads are not those of the machine that plans
        update, said = MOST_BYTES_PER_S, [f"a host elsewhere is assumed to move {MOST_BYTES_PER_S / 1e9:.0f} GB/s"]
    if calibration is not None and (not on_gpu or not machine.elsewhere) and calibration.copies:
        update, said = _memory(calibration), ["the host's memory is calibrated"]
    if on_gpu:
        said.append("the link is a data sheet's" if bound else "the link is calibrated")
    found = Rates(link, update, DISK_BYTES_PER_S, DISK_BYTES_PER_S, ", ".join(said))
    if not files:
        return found
    if disk is None:
        return replace(found, said=f"{found.said}, the disk's rate is assumed")
    return replace(found, read=disk[0], write=disk[1], said=f"{found.said}, the disk is measured")


def _memory(calibration: Calibration) -> float:
    """A copy of tensors that no cache holds moves as many bytes as a step does: 11.7 and 11.6 GB/s of one thread were measured."""
    return max(calibration.copies, key=lambda one: one.num_bytes).bytes_per_s
