"""Binds this process to its share of the machine: processors first, then where its memory comes from, before it allocates any."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hone.base.errors import SpecError
from hone.measure.topology.placement import BINDINGS, NumaBinding, Placement, Share, assign, nodes_of_layers
from hone.measure.topology.policy import bound_pages, by_first_touch, prefer, trial
from hone.measure.topology.read import Topology, read_topology

SETTING = "HONE_NUMA_BINDING"
"""The environment variable that names the binding, also to the processes that a command starts."""


def asked(environment: Mapping[str, str] = os.environ) -> NumaBinding:
    """The binding that the environment names; auto without one. Raises SpecError for an unknown one."""
    return checked(environment.get(SETTING) or "auto", SETTING)


def checked(value: str, what: str) -> NumaBinding:
    """`value` as a binding. Raises SpecError for an unknown one, naming `what` has it."""
    for name in BINDINGS:
        if value == name:
            return name
    raise SpecError(f"{what}={value} is no way to bind processes", fix=f"use one of: {', '.join(BINDINGS)}")


class Bound:
    """What `bind` did, in words, and its reverse."""

    def __init__(self, said: str, undo: Callable[[], None] = lambda: None) -> None:
        self.said = said
        self.undo = undo


def bind(share: Share | None) -> Bound:
    """Binds all threads of this process to the processors of `share`, takes new memory from its node, and caps torch's threads.

    Threads that are started later inherit both. Where memory policies are not allowed, pages come from the node of the thread that touches
    them first, which is now on that node. Nothing for None, or where the system cannot bind (macOS).
    """
    if share is None:
        return Bound("")
    if not hasattr(os, "sched_setaffinity"):
        return Bound("this system binds no process to processors")
    before = os.sched_getaffinity(0)
    _all_threads(share.cpus)
    several = len(read_topology(allowed=before).nodes) > 1
    policy, why = prefer(share.node) if several else ("first touch", "")
    torch: Any = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 0
    if torch is not None and share.threads < threads:
        torch.set_num_threads(share.threads)

    def undo() -> None:
        _all_threads(before)
        if policy != "first touch":
            by_first_touch()
        if torch is not None:
            torch.set_num_threads(threads)

    memory = f", memory of node {share.node} by {policy}" if several else ""
    reason = f" ({why})" if why else ""
    return Bound(f"bound to processors {_ranges(share.cpus)}{memory}{reason}", undo)


def _all_threads(cpus: Sequence[int] | set[int]) -> None:
    """Binds every thread of this process that is there."""
    threads = [int(path.name) for path in Path("/proc/self/task").glob("*")] or [0]
    for thread in threads:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(thread, set(cpus))


def _ranges(cpus: Sequence[int]) -> str:
    """'0-3,8'."""
    parts: list[str] = []
    for cpu in sorted(cpus):
        first, _, last = (parts[-1] if parts else "-9").rpartition("-") if parts else ("", "", "-9")
        if parts and int(last) + 1 == cpu:
            parts[-1] = f"{first or last}-{cpu}"
        else:
            parts.append(str(cpu))
    return ",".join(parts)


def address_of(index: int) -> str | None:
    """The PCI address of a CUDA device; None where torch does not tell."""
    import torch

    found = torch.cuda.get_device_properties(index)
    if not hasattr(found, "pci_bus_id"):
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def node_of_gpu(topology: Topology, index: int) -> int | None:
    """The NUMA node that CUDA device `index` is attached to; None where that is not told."""
    address = address_of(index)
    return next((device.node for device in topology.devices if device.address == address), None)


def place_of(process: int, processes: int, device: str = "cpu", binding: NumaBinding | None = None) -> Placement:
    """The placement of `processes` of this machine on `device` ('cpu', or 'cuda': process i has GPU i), with the asked binding.

    `shares[process]` is this process's.
    """
    topology = read_topology()
    near: list[int | None] = []
    if device.startswith("cuda") and len(topology.compute_nodes) > 1:
        first = int(device.partition(":")[2] or 0) - (process if ":" in device else 0)
        near = [node_of_gpu(topology, first + number) for number in range(processes)]
    return assign(topology, processes, binding or asked(), near=near)


def spread_layers(layers: Sequence[Any], topology: Topology | None = None) -> str:
    """Moves the weights of layer i to node i mod n, where one process computes all layers on several nodes; returns what was done.

    The threads of all nodes read every layer: so each node's memory gives an equal part of the bandwidth, whoever loaded the weights.
    """
    topology = topology or read_topology()
    if len(topology.compute_nodes) < 2:
        return ""
    for layer, node in zip(layers, nodes_of_layers(topology, len(layers)), strict=True):
        tensors = [*layer.parameters(), *layer.buffers()]
        ranges = [
            (one.untyped_storage().data_ptr(), one.untyped_storage().nbytes())
            for one in tensors
            if one.device.type == "cpu"
        ]
        if why := bound_pages(ranges, node, strict=False):
            return f"the layers stay where they were loaded: {why}; tensor_parallel_size={len(topology.compute_nodes)} divides them by node"
    return f"layer i is on NUMA node i mod {len(topology.compute_nodes)}"


def shares_for_children(processes: int) -> tuple[list[Share | None], str]:
    """The shares of worker processes without GPUs, and what to say once. A node whose memory cannot be asked for is tried here, once."""
    placement = place_of(0, processes)
    nodes = {share.node for share in placement.shares if share is not None}
    why = "; ".join(sorted({said for node in nodes if (said := trial("preferred", node))})) if len(nodes) > 1 else ""
    return list(placement.shares), why or placement.why
