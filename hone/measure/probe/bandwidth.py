"""Bandwidth of the host: reading by size, STREAM by number of threads, between NUMA nodes, and latency beside such traffic."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hone.measure.probe.buffers import Buffer
from hone.measure.probe.latency import Chain, largest_bytes
from hone.measure.probe.result import LoadedPoint, NodePair, Sample, SizePoint, StreamPoint
from hone.measure.probe.threads import counts, in_order, on_thread, pin, together
from hone.measure.topology.read import Node, Topology

TURNS = 5
_TURN_BYTES, _QUICK_BYTES = 256 << 20, 64 << 20
"""Bytes that one thread reads in a turn."""
_HUGE = 2 << 20
_LOAD_BYTES, _LOADED_TURN_S = 32 << 20, 40e-3
"""Bytes of each of the three arrays that traffic runs over, and the length of a turn of the chain beside it, many passes long."""


def read_by_size(sizes: Sequence[int], *, quick: bool) -> list[SizePoint]:
    """Bytes per second that one thread reads of a buffer of each of `sizes`, again and again."""
    from hone.measure.probe import kernels

    buffer = Buffer(-(-max(sizes) // _HUGE) * _HUGE, huge=True)
    found = []
    for size in sizes:
        values = buffer.view(np.int64, size)
        values[:] = 1
        times = max(1, (_QUICK_BYTES if quick else _TURN_BYTES) // 4 // size)
        found.append(
            SizePoint(num_bytes=size, bytes_per_s=_rates(lambda v=values, t=times: kernels.read(v, t), size * times))
        )
    return found


def _rates(work: Any, num_bytes: int) -> Sample:
    """Bytes per second of `work` in each of TURNS turns after one that does not count."""
    found = []
    for _ in range(TURNS + 1):
        begun = time.perf_counter()
        work()
        found.append(num_bytes / (time.perf_counter() - begun))
    return Sample.of(found[1:])


def read_by_all(cpus: Sequence[int], num_bytes: int, *, quick: bool = False) -> Sample:
    """Bytes per second that threads on `cpus` read, each of a buffer of its own of `num_bytes`."""
    from hone.measure.probe import kernels

    size = max(4096, num_bytes // 64 * 64)
    times = max(2, (_QUICK_BYTES if quick else _TURN_BYTES) // size)

    def prepare(_: int) -> Any:
        buffer = Buffer(-(-size // _HUGE) * _HUGE, huge=True)
        values = buffer.view(np.int64, size)
        values[:] = 1
        return values

    took = together(cpus, prepare, lambda values: kernels.read(values, times), TURNS)
    return Sample.of([size * times * len(cpus) / one for one in took])


def stream_bytes(topology: Topology, memory_bytes: int) -> int:
    """Bytes of one of STREAM's three arrays: four times the caches of all (its rule), at most 1 GiB and 1/16 of the memory."""
    last = max((one.level for one in topology.caches), default=0)
    caches = sum(one.size_bytes for one in topology.caches if one.level == last)
    return min(max(4 * caches, 64 << 20), 1 << 30, memory_bytes // 16)


def streams(topology: Topology, array_bytes: int, *, quick: bool) -> list[StreamPoint]:
    """Copy and triad for 1, 2, 4, ... threads; each thread has its part of the arrays, touched by itself."""
    from hone.measure.probe import kernels

    cpus = in_order(topology)[: topology.num_usable]
    wanted = [one for one in counts(len(cpus)) if not quick or one in (1, len(cpus))]
    found = []
    for threads in wanted:
        length = array_bytes // threads // 4096 * 512

        def prepare(_: int, length: int = length) -> Any:
            return [_ones(length) for _ in range(3)]

        took = together(cpus[:threads], prepare, lambda arrays: kernels.triad(*arrays, 3.0), TURNS)
        rates = Sample.of([3 * 8 * length * threads / one for one in took])
        found.append(StreamPoint(kernel="triad", threads=threads, bytes_per_s=rates))
        took = together(cpus[:threads], prepare, lambda arrays: kernels.copy(*arrays[:2]), TURNS)
        rates = Sample.of([2 * 8 * length * threads / one for one in took])
        found.append(StreamPoint(kernel="copy", threads=threads, bytes_per_s=rates))
    return found


def _ones(length: int) -> Any:
    """`length` float64 in large pages where the kernel gives them; the array keeps its memory alive."""
    values = Buffer(-(-length * 8 // _HUGE) * _HUGE, huge=True).view(np.float64, length * 8)
    values[:] = 1.0
    return values


_PLACED = 0.9
"""Fraction of a buffer's pages that must be on the node that its rate is told of."""


def node_pairs(topology: Topology, memory_bytes: int, *, quick: bool) -> tuple[list[NodePair], list[str]]:
    """Triad and latency of the processors of each node on the memory of each; and which nodes were left out, and why.

    Memory is placed by its first touch, by a thread on a processor of its node. A node without processors (CXL) has none that could:
    there pages are bound, where the kernel lets this process.
    """
    from hone.measure.topology.policy import bound_pages, nodes_of_pages

    found, notes = [], []
    sources = topology.compute_nodes
    if len(topology.nodes) < 2:
        return [], []
    size = min(256 << 20, memory_bytes // 32) >> (2 if quick else 0)
    for memory in topology.nodes:
        if not memory.allowed or not (memory.memory_bytes or 0):
            notes.append(f"node {memory.id} was left out: this process may not use its memory, or it has none")
            continue
        for source in sources:
            buffers = [Buffer(size, huge=True) for _ in range(3)]
            if memory.cpus:
                on_thread(memory.cpus, lambda buffers=buffers: [one.view(np.uint8).fill(1) for one in buffers])
            elif why := bound_pages([(one.address, size) for one in buffers], memory.id):
                notes.append(f"node {memory.id} has no processors and was left out: {why}")
                break
            else:
                for one in buffers:
                    one.view(np.uint8).fill(1)
            where = nodes_of_pages(buffers[0].address, size)
            if where is not None and where.get(memory.id, 0) < _PLACED * sum(where.values()):
                notes.append(f"node {memory.id} was left out: pages meant for it are on nodes {sorted(where)}")
                break
            found.append(_pair(topology, source, memory, buffers, size))
    return found, notes


def _pair(topology: Topology, source: Node, memory: Node, buffers: list[Buffer], size: int) -> NodePair:
    from hone.measure.probe import kernels

    cpus = in_order(topology, source.cpus)[: max(1, min(len(source.cpus), topology.num_usable))]
    length = size // 8 // len(cpus)
    views = [one.view(np.float64) for one in buffers]

    def part(place: int) -> Any:
        return [view[place * length : (place + 1) * length] for view in views]

    took = together(cpus, part, lambda arrays: kernels.triad(*arrays, 3.0), TURNS)
    rates = Sample.of([3 * 8 * length * len(cpus) / one for one in took])
    latency = on_thread(cpus[0], lambda: Chain(buffers[0], size).seconds(5e-3))
    return NodePair(cpu_node=source.id, memory_node=memory.id, bytes_per_s=rates, latency_s=latency)


def loaded(topology: Topology, memory_bytes: int, *, quick: bool) -> list[LoadedPoint]:
    """Latency of one chain in memory while 0, 1, 2, 4, ... other threads run triad, up to all processors but the chain's own."""
    from hone.measure.probe import kernels

    cpus = in_order(topology)[: topology.num_usable]
    size = largest_bytes(topology, memory_bytes)
    each = min(_LOAD_BYTES, stream_bytes(topology, memory_bytes)) // 8
    buffer = Buffer(-(-size // _HUGE) * _HUGE, huge=True)
    chain = on_thread(cpus[0], lambda: Chain(buffer, size))
    wanted = [0, *counts(len(cpus) - 1)] if len(cpus) > 1 else [0]
    wanted = [wanted[0], wanted[-1]] if quick and len(wanted) > 2 else wanted
    found = []
    for threads in wanted:
        stop, turns = np.zeros(1, np.uint8), [0] * threads
        ready = threading.Barrier(threads + 1)

        def traffic(place: int, stop=stop, turns=turns, ready=ready) -> None:
            pin(cpus[1 + place])
            arrays = [_ones(each) for _ in range(3)]
            kernels.triad_until(*arrays, 3.0, np.ones(1, np.uint8))  # compiles it
            ready.wait()
            turns[place] = kernels.triad_until(*arrays, 3.0, stop)

        workers = [threading.Thread(target=traffic, args=(place,), daemon=True) for place in range(threads)]
        for worker in workers:
            worker.start()
        ready.wait()
        begun = time.perf_counter()
        latency = on_thread(cpus[0], lambda: chain.seconds(_LOADED_TURN_S))
        stop[0] = 1
        for worker in workers:
            worker.join()
        moved = sum(turns) * 3 * 8 * each
        found.append(LoadedPoint(threads=threads, bytes_per_s=moved / (time.perf_counter() - begun), latency_s=latency))
    return found
