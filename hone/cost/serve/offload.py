"""Layers whose weights stay in host memory and are copied to a GPU in every step: which ones, and how long the copies take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.base.figure import Estimate
from hone.cost.catalogue.read import catalogue
from hone.measure.machine import Machine

NUM_BUFFERS = 2
"""Buffers on the device: one layer computes while the weights of the next one arrive."""

PCIE_BYTES_PER_S = 63e9
"""Bytes/s from host memory to a GPU that the catalogue does not have: 16 lanes of PCIe 5.0."""


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

    def beside(self, computed: Estimate, machine: Machine, num_tokens: int) -> Estimate:
        """Seconds of a step of `num_tokens` that computes for `computed` while the copies run: the longer of both."""
        copied = self.copy_seconds(machine)
        return Estimate(
            value=max(computed.value, copied.value),
            unit="s",
            formula=f"max({computed.formula}, copies {copied.value * 1e3:.2f} ms: {copied.formula})",
            bound=computed.bound or copied.bound,
        )


@dataclass(frozen=True)
class ExpertCopies:
    """Experts in host memory: (experts, visits of a token, bytes of an expert) of each layer, and the experts of a layer on the device."""

    layers: tuple[tuple[int, float, float], ...]
    num_cached: int

    def copied_bytes(self, num_tokens: int) -> float:
        """Bytes that a step of `num_tokens` copies, tokens choosing evenly and independently. Visits beyond the cache find nothing there."""
        total = 0.0
        for count, visits, size in self.layers:
            distinct = count * (1 - (1 - visits / count) ** num_tokens)
            held = min(self.num_cached / count, 1.0)
            total += size * distinct * (1 - held if distinct <= self.num_cached or held == 1.0 else 1.0)
        return total

    def beside(self, computed: Estimate, machine: Machine, num_tokens: int) -> Estimate:
        """Seconds of a step that computes for `computed` and waits for its copies: a layer knows its experts when it begins."""
        rate, _ = link_rate(machine)
        copied = self.copied_bytes(num_tokens)
        return Estimate(
            value=computed.value + copied / rate,
            unit="s",
            formula=f"{computed.formula} + {copied:.3g} B of experts at {rate / 1e9:,.1f} GB/s, if tokens choose evenly and nothing is foreseen",
            bound=True,
        )


def expert_hit_rate(shares: Sequence[float], num_cached: int, eviction: str = "lru") -> float:
    """Of a token's visits, the part whose expert is on the device, where tokens choose independently of those before.

    `shares`: the part of tokens that visit each expert. With lru the `num_cached` experts are those of the last t tokens, t such that
    they are so many in the mean (Che, Tung and Wang 2002, "Hierarchical Web caching systems"); with lfu the most visited ones, but for
    one slot, which the last missing expert has: it must be on the device to compute.
    """
    total = sum(shares)
    if num_cached >= sum(share > 0 for share in shares):
        return 1.0
    if eviction == "lfu":
        ordered = sorted(shares, reverse=True)
        stay, pass_by = ordered[: num_cached - 1], ordered[num_cached - 1 :]
        return (sum(stay) + sum(share * share for share in pass_by) / sum(pass_by)) / total
    low, high = 0.0, 1.0

    def there(tokens: float) -> list[float]:
        return [1.0 - (1.0 - min(share, 1.0)) ** tokens for share in shares]

    while sum(there(high)) < num_cached and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(there(middle)) < num_cached else (low, middle)
    return sum(share * held for share, held in zip(shares, there(high))) / total


def link_rate(machine: Machine) -> tuple[float, bool]:
    """(bytes/s from pinned host memory to the device, whether that is only a data-sheet bound)."""
    calibration = machine.calibration
    if calibration is not None and calibration.pinned_bytes_per_s is not None:
        return calibration.pinned_bytes_per_s, False
    row = catalogue().of_processor(machine.processor)
    link = catalogue().link(row.host_link) if row is not None else None
    known = None if link is None else link.bytes_per_s
    return known or PCIE_BYTES_PER_S, True


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
