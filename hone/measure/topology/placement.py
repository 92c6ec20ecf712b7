"""Which processors and which node's memory each process of a run gets: a pure function of the topology.

The ways to bind have the names of `torchrun --numa-binding`. Processes that have a GPU are put on the node it is attached to; others are
spread over the nodes, process i on node i mod n.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hone.measure.topology.read import Node, Topology

NumaBinding = Literal["auto", "none", "node", "socket", "exclusive", "core-complex"]
"""auto: with several nodes, `node` for processes with GPUs and `exclusive` for others; none with one. none: no binding. node: all processors
of a NUMA node. socket: all of its socket. exclusive: the node's cores, divided among its processes. core-complex: those that share a last cache."""

BINDINGS: tuple[NumaBinding, ...] = get_args(NumaBinding)

ONE_NODE = "one NUMA node: nothing to place"


@dataclass(frozen=True)
class Share:
    """Where one process runs."""

    cpus: tuple[int, ...]
    """Logical processors."""
    node: int
    """The NUMA node that its memory comes from."""
    threads: int
    """Most threads of its own that find a core each."""


@dataclass(frozen=True)
class Placement:
    """A share for every process; none where nothing is bound, and why."""

    shares: tuple[Share | None, ...]
    why: str = ""
    """Why nothing is bound, or what a user should know of how it is."""


def assign(
    topology: Topology,
    processes: int,
    binding: NumaBinding = "auto",
    *,
    near: Sequence[int | None] = (),
    reserved: Collection[int] = (),
) -> Placement:
    """Shares for `processes`.

    `near[i]` is the node of process i's GPU; None: it has none, or the firmware does not tell. `reserved` logical processors are
    left out wherever others remain: that of a thread that launches a GPU's kernels. A node whose processors this process may not use is no
    place for one.
    """
    nodes = topology.compute_nodes
    several = len(nodes) > 1
    if binding == "none":
        return Placement((None,) * processes)
    if binding == "auto":
        if not several:
            return Placement((None,) * processes, ONE_NODE)
        if processes == 1 and not any(one is not None for one in near):
            return Placement((None,), "one process without a GPU uses all nodes")
        binding = "node" if any(one is not None for one in near) else "exclusive"
    if binding in ("node", "socket") and not several:
        return Placement((None,) * processes, ONE_NODE)
    homes = _homes(nodes, processes, near)
    shares: list[Share | None] = []
    for number, home in enumerate(homes):
        place, beside = homes[:number].count(home), homes.count(home)
        cpus = _free(_cpus(topology, home, binding, place, beside), reserved)
        sharers = _sharers(topology, home, binding, place, beside, homes)
        cores = sum(bool(set(core) & set(cpus)) for core in topology.cores)
        threads = max(1, cores // sharers)
        if topology.quota is not None:
            threads = max(1, min(threads, int(topology.quota) // processes))
        shares.append(Share(cpus, home.id, threads))
    crowded = max(homes.count(home) for home in homes) > min(len(_cores(topology, home)) for home in homes)
    return Placement(tuple(shares), "more processes than cores: some share one" * (crowded and binding == "exclusive"))


def nodes_of_layers(topology: Topology, num_layers: int) -> list[int]:
    """The node of each layer's weights where one process computes all of them: layer i on node i mod n, of those that it may use."""
    nodes = [node.id for node in topology.compute_nodes if node.allowed]
    return [nodes[layer % len(nodes)] for layer in range(num_layers)] if nodes else []


def _homes(nodes: Sequence[Node], processes: int, near: Sequence[int | None]) -> list[Node]:
    """The node of each process: its GPU's, else the next in turn."""
    by_id = {node.id: node for node in nodes}
    wanted = [*near, *[None] * (processes - len(near))]
    return [
        by_id.get(one if one is not None else -1, nodes[number % len(nodes)])
        for number, one in enumerate(wanted[:processes])
    ]


def _cores(topology: Topology, node: Node) -> list[tuple[int, ...]]:
    """The physical cores of a node."""
    return [core for core in topology.cores if set(core) & set(node.cpus)]


def _cpus(topology: Topology, home: Node, binding: NumaBinding, place: int, beside: int) -> tuple[int, ...]:
    """Processors of the process that is number `place` of `beside` on its node."""
    if binding == "socket":
        return next((group for group in topology.sockets if set(group) & set(home.cpus)), home.cpus)
    if binding == "core-complex":
        groups = topology.core_complexes(home)
        return groups[place % len(groups)]
    if binding == "exclusive":
        cores = _cores(topology, home)
        if beside > len(cores):
            return cores[place % len(cores)]
        first, last = (len(cores) * one // beside for one in (place, place + 1))
        return tuple(sorted(cpu for core in cores[first:last] for cpu in core))
    return home.cpus


def _sharers(
    topology: Topology, home: Node, binding: NumaBinding, place: int, beside: int, homes: Sequence[Node]
) -> int:
    """How many processes have the same processors as this one."""
    if binding == "socket":
        own = _cpus(topology, home, binding, 0, 1)
        return sum(_cpus(topology, other, binding, 0, 1) == own for other in homes)
    if binding == "node":
        return beside
    groups = len(topology.core_complexes(home)) if binding == "core-complex" else len(_cores(topology, home))
    if binding == "exclusive" and beside <= groups:
        return 1
    return len(range(place % groups, beside, groups))


def _free(cpus: tuple[int, ...], reserved: Collection[int]) -> tuple[int, ...]:
    """`cpus` without the reserved ones, unless nothing else is there."""
    return tuple(cpu for cpu in cpus if cpu not in reserved) or cpus
