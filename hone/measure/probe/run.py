"""Probes the whole machine: host, disk and GPUs, part by part, and says what was left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from hone.measure.load import processor_load
from hone.measure.machine import describe
from hone.measure.probe.result import Level, MachineProbe
from hone.measure.scratch import here, scratch
from hone.measure.topology.limits import ROOT, word_of
from hone.measure.topology.read import Topology, read_topology

_FILE_BYTES, _QUICK_FILE_BYTES = 256 << 20, 64 << 20


LIMIT_S, QUICK_LIMIT_S = 60.0, 30.0
"""Seconds after which no further part is begun: a busy or slow machine has fewer figures, and a note says which are missing."""

_OTHERS = 0.2
"""Fraction of the processors that other work may take before the figures count as disturbed."""


class _Course:
    """The parts of a probe one after the other: what they found, what was left out, and the time that is left."""

    def __init__(self, quick: bool, say: Callable[[str], None], limit_s: float) -> None:
        self.quick, self.say = quick, say
        self.begun = time.perf_counter()
        self.deadline = self.begun + limit_s
        self.limit_s = limit_s
        self.found: dict[str, Any] = {}
        self.levels: list[Level] = []
        self.notes: list[str] = []

    def halfway(self) -> float:
        """The moment when half of the time that is left has passed."""
        now = time.perf_counter()
        return now + max(self.deadline - now, 0.0) / 2

    def part(self, name: str) -> bool:
        """Says that a part begins; False when there is no time for it, which a note says."""
        if time.perf_counter() > self.deadline:
            self.notes.append(f"{name}: not measured, the parts before it took the {self.limit_s:.0f} s of a probe")
            return False
        self.say(name)
        return True


def probe_machine(
    *,
    quick: bool = False,
    gpus: bool = True,
    say: Callable[[str], None] = lambda _: None,
    limit_s: float | None = None,
) -> MachineProbe:
    """Measures the memory hierarchy of this machine.

    `quick` has fewer and shorter turns. `gpus` takes every CUDA device that torch sees, too. `say` gets the name of each part as it
    begins; after `limit_s` (None: LIMIT_S, or QUICK_LIMIT_S) none begins. GPUs are first. Parts that are not measured are
    absent, with the reason in `notes`; nothing is guessed.
    """
    if limit_s is None:
        limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    topology, machine, course = read_topology(), describe(), _Course(quick, say, limit_s)
    before = processor_load()
    if gpus:  # who asks for them must not find that the host's parts took all the time
        _gpus(topology, course)
    _host(topology, machine.ram_bytes, course)
    if course.part("disk"):
        _disk(course)
    others = processor_load().others_since(before)
    if others > _OTHERS * len(topology.cpus):
        course.notes.append(
            f"other work took {others:.1f} of the {len(topology.cpus)} processors meanwhile: latencies may be too high and rates too low"
        )
    course.notes += _conditions(topology)
    return MachineProbe(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - course.begun,
        quick=quick,
        processor=machine.cpu,
        topology=topology,
        levels=tuple(course.levels),
        notes=tuple(course.notes),
        **course.found,
    )


def _host(topology: Topology, memory_bytes: int, course: _Course) -> None:
    """The parts that numba's kernels measure."""
    if find_spec("numba") is None:
        course.notes.append(
            "the host's memory was not measured: its loops are compiled by numba, which is missing (pip install 'hone-llm[data]')"
        )
        return
    from hone.measure.probe import bandwidth, latency

    quick, found = course.quick, course.found
    if not course.part("latency of the host's caches and memory"):
        return
    largest = latency.largest_bytes(topology, memory_bytes)
    registers = latency.register_latency()
    points = latency.latency_curve(largest, quick=quick, deadline=course.halfway())
    found["latency"] = tuple(points)
    if not any(point.huge_pages for point in points):
        course.notes.append(
            "no chain in large pages: latencies of large sizes hold the cost of address translation, too"
        )
    levels = latency.levels_of(topology, points, memory_bytes)
    course.levels.append(Level(name="registers", device="host", latency_s=registers, note="a dependent shift or xor"))
    if course.part("bandwidth of the host's caches and memory"):
        sizes = [point.num_bytes for point in points if not point.huge_pages][:: 2 if quick else 1]
        found["bandwidth"] = tuple(bandwidth.read_by_size(sizes, quick=quick))
        levels = [_with_bandwidth(topology, level, largest, quick) for level in levels]
    course.levels += levels
    if course.part("bandwidth by threads"):
        array_bytes = bandwidth.stream_bytes(topology, memory_bytes)
        if array_bytes < 4 * sum(one.size_bytes for one in topology.caches if one.level == 3):
            course.notes.append(
                "STREAM's arrays are smaller than four times the last caches: its rates may be too high"
            )
        found["streams"] = tuple(bandwidth.streams(topology, array_bytes, quick=quick))
    if course.part("latency beside other traffic"):
        found["loaded"] = tuple(bandwidth.loaded(topology, memory_bytes, quick=quick))
    if len(topology.nodes) > 1 and course.part("bandwidth between NUMA nodes"):
        pairs, notes = bandwidth.node_pairs(topology, memory_bytes, quick=quick)
        found["pairs"] = tuple(pairs)
        course.notes += notes


def _with_bandwidth(topology: Topology, level: Level, largest: int, quick: bool) -> Level:
    """`level` with the rate at which all threads read it, each a buffer that its part of the level holds."""
    from hone.measure.probe.bandwidth import read_by_all
    from hone.measure.probe.threads import in_order

    cpus = in_order(topology)[: topology.num_usable]
    sharers = {f"L{one.level}": sum(cpu in one.cpus for cpu in cpus) for one in topology.cache_levels(cpus[0])}
    if level.name == "memory":
        size = largest // len(cpus)
    else:
        assert level.size_bytes is not None, "a cache has a size"
        held = min(level.size_bytes, level.knee_bytes or level.size_bytes)
        size = held // 2 // max(1, sharers[level.name])
    return level.model_copy(update={"bytes_per_s": read_by_all(cpus, size, quick=quick)})


def _disk(course: _Course) -> None:
    from hone.measure.probe.disk import probe_disk

    with scratch(here()) as folder:
        if folder is None:
            course.notes.append("the disk was not measured: no folder can be made in the current one")
            return
        disk, why = probe_disk(folder, _QUICK_FILE_BYTES if course.quick else _FILE_BYTES)
        if disk is None:
            course.notes.append(why)
            return
        course.found["disk"] = disk.model_copy(update={"folder": str(folder.parent)})
    how = "past the page cache" if disk.direct else "after its pages were dropped from the page cache"
    level = Level(
        name="disk", device="host", latency_s=disk.read_latency_s, bytes_per_s=disk.read_bytes_per_s, note=how
    )
    course.levels.append(level)


def _gpus(topology: Topology, course: _Course) -> None:
    """Every CUDA device that torch sees, then the copies between them."""
    import torch

    if not torch.cuda.is_available():
        course.notes.append("no GPU was measured: torch sees none")
        return
    from hone.measure.probe.gpu import probe_gpu
    from hone.measure.probe.peers import peer_pairs

    count, found = torch.cuda.device_count(), []
    for index in range(count):
        if course.part(f"GPU {index}"):
            probe, notes = probe_gpu(index, topology, quick=course.quick)
            found.append(probe)
            course.notes += notes
    course.found["gpus"] = tuple(found)
    if count > 1 and course.part("copies between GPUs"):
        course.found["peers"] = tuple(peer_pairs(count, quick=course.quick))


def _conditions(topology: Topology) -> list[str]:
    """What of this machine's state limits how far its figures can be trusted."""
    notes = []
    if topology.governor not in (None, "performance"):
        notes.append(f"the clock governor is {topology.governor}: short work may run at a lower clock")
    if topology.quota is not None and topology.quota < len(topology.cpus):
        notes.append(
            f"a cgroup grants the time of {topology.quota:g} processors of {len(topology.cpus)}: threads beyond that pause each other"
        )
    if len(topology.nodes) > 1 and word_of(ROOT / "proc/sys/kernel/numa_balancing") == "1":
        notes.append(
            "the kernel moves pages between nodes (numa_balancing is 1): rates between nodes may mix two of them"
        )
    return notes
