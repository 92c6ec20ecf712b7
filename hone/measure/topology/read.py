"""Reads NUMA nodes, cores, caches, GPUs, network cards and limits from the kernel's files, without a library."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hone.measure.topology.limits import (
    ROOT,
    allowed_memory_nodes,
    lines_of,
    memory_limit,
    numbers,
    processor_quota,
    word_of,
)

_CLASSES: dict[str, Literal["gpu", "network", "disk"]] = {
    "0x0300": "gpu",
    "0x0302": "gpu",
    "0x1200": "gpu",
    "0x0200": "network",
    "0x0207": "network",
    "0x0108": "disk",
}
"""PCI classes: display and 3D controllers and processing accelerators, Ethernet and InfiniBand, NVMe."""
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}


class Cache(BaseModel):
    """One cache of data, and the logical processors that share it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int
    size_bytes: int
    line_bytes: int
    cpus: tuple[int, ...]


class Node(BaseModel):
    """One NUMA node: processors and the memory next to them. A node of memory alone (CXL) has no processors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int
    cpus: tuple[int, ...] = Field(description="Logical processors of it that this process may use.")
    memory_bytes: int | None = Field(description="None: the kernel does not tell.")
    distances: tuple[int, ...] = Field(
        (), description="To each node in the order of ids, as the firmware says: 10 is itself, 20 twice as far."
    )
    allowed: bool = Field(True, description="Whether this process may allocate memory there (its cpuset).")


class Device(BaseModel):
    """One GPU, network card or NVMe disk on PCI Express."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(description="Domain, bus, device and function, as 0000:17:00.0.")
    kind: Literal["gpu", "network", "disk"]
    vendor: str = Field(description="The vendor's name, else its number.")
    node: int | None = Field(description="The NUMA node it is attached to; None: the firmware does not tell.")


class Topology(BaseModel):
    """Processors, memory nodes, caches and devices of a machine, as far as this process may use them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[Node, ...]
    cpus: tuple[int, ...] = Field(description="Logical processors that this process may use.")
    cores: tuple[tuple[int, ...], ...] = Field(description="Of each physical core, the logical processors of `cpus`.")
    sockets: tuple[tuple[int, ...], ...] = Field(description="The same of each processor package.")
    caches: tuple[Cache, ...] = ()
    devices: tuple[Device, ...] = ()
    quota: float | None = Field(None, description="Processors' worth of time that a cgroup grants; None: no limit.")
    memory_limit_bytes: int | None = Field(None, description="Memory that a cgroup grants; None: no limit.")
    governor: str | None = Field(None, description="How the kernel sets clock rates; None: it does not tell.")
    unified: str = Field(
        "", description='Why processors and GPU share one memory, as on Apple\'s chips; "": they do not.'
    )

    @property
    def compute_nodes(self) -> tuple[Node, ...]:
        """Nodes with processors that this process may use."""
        return tuple(node for node in self.nodes if node.cpus)

    @property
    def num_usable(self) -> int:
        """Logical processors that work at once: those allowed, or fewer by the quota."""
        return max(1, min(len(self.cpus), int(self.quota or len(self.cpus))))

    def cache_levels(self, cpu: int | None = None) -> tuple[Cache, ...]:
        """The caches of data that one logical processor (default: the first allowed) passes, nearest first."""
        cpu = self.cpus[0] if cpu is None else cpu
        return tuple(sorted((one for one in self.caches if cpu in one.cpus), key=lambda one: one.level))

    def core_complexes(self, node: Node) -> tuple[tuple[int, ...], ...]:
        """The logical processors of `node` by the last cache they share."""
        last = max((one.level for one in self.caches), default=0)
        groups = {tuple(cpu for cpu in one.cpus if cpu in node.cpus) for one in self.caches if one.level == last}
        return tuple(sorted(group for group in groups if group)) or (node.cpus,)


def read_topology(root: Path = ROOT, allowed: Iterable[int] | None = None) -> Topology:
    """The topology below `root` ("/", or a copy of /sys and /proc for tests).

    `allowed` are the logical processors to use: by default those of this process's affinity. A kernel that has no such files
    (macOS) is one node with all processors and no known caches.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cpus = tuple(sorted(allowed))
    folder = root / "sys/devices/system/cpu"
    return Topology(
        nodes=_nodes(root, cpus),
        cpus=cpus,
        cores=_groups(cpus, folder, "thread_siblings_list"),
        sockets=_groups(cpus, folder, "package_cpus_list", "core_siblings_list"),
        caches=_caches(folder, cpus),
        devices=_devices(root),
        quota=processor_quota(root),
        memory_limit_bytes=memory_limit(root),
        governor=word_of(folder / f"cpu{cpus[0]}/cpufreq/scaling_governor") or None,
        unified=_unified() if root == ROOT else "",
    )


def _unified() -> str:
    """Why this machine has one memory for all, where the platform alone says so."""
    return (
        "one memory for processors and GPU" if platform.system() == "Darwin" and platform.machine() == "arm64" else ""
    )


def _nodes(root: Path, cpus: tuple[int, ...]) -> tuple[Node, ...]:
    folder, mems = root / "sys/devices/system/node", allowed_memory_nodes(root)
    found = []
    for path in folder.glob("node[0-9]*"):
        number = int(path.name.removeprefix("node"))
        memory = _memory(path)
        own = tuple(cpu for cpu in numbers(word_of(path / "cpulist")) if cpu in cpus)
        if own or memory:
            distances = tuple(map(int, word_of(path / "distance").split()))
            may = mems is None or number in mems
            found.append(Node(id=number, cpus=own, memory_bytes=memory, distances=distances, allowed=may))
    found.sort(key=lambda node: node.id)
    return tuple(found) or (Node(id=0, cpus=cpus, memory_bytes=None),)


def _memory(path: Path) -> int | None:
    """Bytes of a node, from its line 'Node 0 MemTotal: 24600 kB'."""
    for line in lines_of(path / "meminfo"):
        if "MemTotal:" in line:
            return int(line.partition("MemTotal:")[2].split()[0]) << 10
    return None


def _groups(cpus: tuple[int, ...], folder: Path, *names: str) -> tuple[tuple[int, ...], ...]:
    """`cpus` in groups, by the first of the files `names` in a processor's topology; one group of each without them."""
    groups = []
    for cpu in cpus:
        words = [word_of(folder / f"cpu{cpu}/topology" / name) for name in names]
        listed = numbers(next(filter(None, words), str(cpu)))
        groups.append(tuple(one for one in listed if one in cpus) or (cpu,))
    return tuple(dict.fromkeys(groups))


def _caches(folder: Path, cpus: tuple[int, ...]) -> tuple[Cache, ...]:
    found: dict[tuple, Cache] = {}
    for cpu in cpus:
        for path in sorted(folder.glob(f"cpu{cpu}/cache/index[0-9]*")):
            size = word_of(path / "size")
            if word_of(path / "type") == "Instruction" or not size:
                continue
            shared = tuple(one for one in numbers(word_of(path / "shared_cpu_list")) if one in cpus)
            cache = Cache(
                level=int(word_of(path / "level")),
                size_bytes=_binary(size),
                line_bytes=int(word_of(path / "coherency_line_size") or 64),
                cpus=shared or (cpu,),
            )
            found[cache.level, cache.cpus] = cache
    return tuple(sorted(found.values(), key=lambda one: (one.level, one.cpus)))


def _binary(size: str) -> int:
    """Bytes of '1024K' or '32M'."""
    return int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)


def _devices(root: Path) -> tuple[Device, ...]:
    found = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor = _CLASSES.get(word_of(path / "class")[:6]), word_of(path / "vendor")
        if kind is None or (kind == "gpu" and vendor not in _GPU_VENDORS):
            continue  # a server's management chip has a display, too
        node = word_of(path / "numa_node")
        known = int(node) if node.isdigit() else None  # -1: not told
        found.append(Device(address=path.name, kind=kind, vendor=_GPU_VENDORS.get(vendor, vendor), node=known))
    return tuple(found)
