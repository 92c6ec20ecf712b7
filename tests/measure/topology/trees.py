"""Writes the files of /sys and /proc of machines that are not here: what the reader of topologies is tested with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def put(root: Path, path: str, text: str | int) -> None:
    """One small file of a tree."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf8")


def spell(cpus: Sequence[int]) -> str:
    """Processors as the kernel lists them, here without ranges."""
    return ",".join(map(str, cpus))


def machine(
    root: Path,
    nodes: Sequence[Sequence[int]],
    *,
    sockets: Sequence[Sequence[int]] | None = None,
    siblings: int = 1,
    l3: Sequence[Sequence[int]] | None = None,
    memory_gib: Sequence[int] | None = None,
    devices: Mapping[str, tuple[str, str, int]] | None = None,
) -> Path:
    """A machine: the processors of each node, of each socket and of each last cache; PCI devices as address -> (class, vendor, node).

    `siblings` successive threads make one core: with 2, processors 0 and 1 are one.
    """
    every = [cpu for node in nodes for cpu in node]
    for number, cpus in enumerate(nodes):
        folder = f"sys/devices/system/node/node{number}"
        put(root, f"{folder}/cpulist", spell(cpus))
        gib = memory_gib[number] if memory_gib else 64
        put(root, f"{folder}/meminfo", f"Node {number} MemTotal:       {gib << 20} kB")
        put(root, f"{folder}/distance", " ".join("10" if number == other else "21" for other in range(len(nodes))))
    for cpu in every:
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        core = [one for one in every if one // siblings == cpu // siblings]
        put(root, f"{folder}/topology/thread_siblings_list", spell(core))
        put(root, f"{folder}/topology/package_cpus_list", spell(_of(sockets or [every], cpu)))
        for index, (level, kind, size, shared) in enumerate(
            [(1, "Data", "32K", core), (1, "Instruction", "32K", core), (2, "Unified", "1024K", core), (3, "Unified", "32M", _of(l3 or nodes, cpu))]
        ):  # fmt: skip
            for name, value in {"level": level, "type": kind, "size": size, "shared_cpu_list": spell(shared)}.items():
                put(root, f"{folder}/cache/index{index}/{name}", value)
            put(root, f"{folder}/cache/index{index}/coherency_line_size", 64)
    for address, (kind, vendor, node) in (devices or {}).items():
        for name, value in {"class": kind, "vendor": vendor, "numa_node": node}.items():
            put(root, f"sys/bus/pci/devices/{address}/{name}", value)
    return root


def _of(groups: Sequence[Sequence[int]], cpu: int) -> Sequence[int]:
    return next(group for group in groups if cpu in group)
