"""Layers whose weights stay in host memory and are copied to a GPU in every step: which ones, and how long the copies take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.base.figure import Estimate
from hone.measure.machine import Machine

NUM_BUFFERS = 2
"""Buffers on the device: one layer computes while the weights of the next one arrive."""

LINKS = {"GH200": 450e9, "GB200": 450e9}
"""Bytes/s from host memory to GPUs with NVLink-C2C, each way (data sheets)."""

PCIE_BYTES_PER_S = 64e9
"""The same of every other GPU: 16 lanes of PCIe 5.0, which no PCIe GPU exceeds today."""


@dataclass(frozen=True)
class Offload:
    """Bytes of every layer's weights, and the layers that are copied to the device in each step, in order."""

    layer_bytes: tuple[float, ...]
    streamed: tuple[int, ...]

    @property
    def streamed_bytes(self) -> float:
        """Bytes that a step copies to the device."""
        return sum(self.layer_bytes[index] for index in self.streamed)

    @property
    def buffer_bytes(self) -> float:
        """Bytes of the buffers on the device."""
        return NUM_BUFFERS * max((self.layer_bytes[index] for index in self.streamed), default=0.0)

    @property
    def device_bytes(self) -> float:
        """Bytes of layers on the device: the resident ones and the buffers."""
        return sum(self.layer_bytes) - self.streamed_bytes + self.buffer_bytes

    def loaded(self, streamed_bytes: Sequence[float]) -> Offload:
        """The same with the bytes that the streamed layers take in memory."""
        known = dict(zip(self.streamed, streamed_bytes, strict=True))
        return Offload(tuple(known.get(index, size) for index, size in enumerate(self.layer_bytes)), self.streamed)

    def copy_seconds(self, machine: Machine) -> Estimate:
        """Seconds of a step's copies."""
        rate, bound = link_rate(machine)
        source = "data-sheet bound: `hone calibrate` measures it" if bound else "calibrated"
        return Estimate(
            value=self.streamed_bytes / rate,
            unit="s",
            formula=f"{self.streamed_bytes:.3g} B from host memory at {rate / 1e9:,.1f} GB/s ({source})",
            bound=bound,
        )

    def beside(self, computed: Estimate, machine: Machine) -> Estimate:
        """Seconds of a step that computes for `computed` while the copies run: the longer of both."""
        copied = self.copy_seconds(machine)
        return Estimate(
            value=max(computed.value, copied.value),
            unit="s",
            formula=f"max({computed.formula}, copies {copied.value * 1e3:.2f} ms: {copied.formula})",
            bound=computed.bound or copied.bound,
        )


def link_rate(machine: Machine) -> tuple[float, bool]:
    """(bytes/s from pinned host memory to the device, whether that is only a data-sheet bound)."""
    calibration = machine.calibration
    if calibration is not None and calibration.pinned_bytes_per_s is not None:
        return calibration.pinned_bytes_per_s, False
    known = (rate for name, rate in LINKS.items() if name in machine.processor)
    return next(known, PCIE_BYTES_PER_S), True


def evenly_spaced(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` of `num_layers` layers as far apart as possible, so that each copy has as many layers' computing beside it."""
    return tuple((index * num_layers + num_layers // 2) // count for index in range(count))


def fewest_streamed(layer_bytes: Sequence[float], room: float) -> Offload | None:
    """The fewest streamed layers with which all layers take at most `room` bytes of the device; None where none do.

    As many layers as there are buffers would save nothing.
    """
    sizes, count = tuple(layer_bytes), len(layer_bytes)
    for streamed in (0, *range(NUM_BUFFERS + 1, count + 1)):
        found = Offload(sizes, evenly_spaced(count, streamed))
        if found.device_bytes <= room:
            return found
    return None
