"""Runs the same work on several threads at once, each on its own logical processor, and times each turn as a whole."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hone.measure.topology.read import Topology


def pin(cpu: int | Sequence[int]) -> None:
    """Binds the calling thread to a logical processor, or to several; nothing where the system cannot."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu} if isinstance(cpu, int) else set(cpu))


def in_order(topology: Topology, cpus: Sequence[int] | None = None) -> list[int]:
    """Logical processors in the order in which a probe takes them: node after node, a second thread of a core last."""
    cpus = topology.cpus if cpus is None else cpus
    nodes = {cpu: node.id for node in topology.nodes for cpu in node.cpus}
    rank = {cpu: place for core in topology.cores for place, cpu in enumerate(core)}
    return sorted(cpus, key=lambda cpu: (rank.get(cpu, 0), nodes.get(cpu, 0), cpu))


def counts(most: int) -> list[int]:
    """1, 2, 4, ... threads up to `most`, with `most`."""
    return sorted({1 << power for power in range(most.bit_length()) if 1 << power <= most} | {most})


def together(
    cpus: Sequence[int],
    prepare: Callable[[int], Any],
    work: Callable[[Any], object],
    turns: int,
    settle: Callable[[int], None] | None = None,
) -> list[float]:
    """Seconds of each of `turns` turns of `work` on all of `cpus`, from the first start to the last end.

    Each thread binds itself to its processor, then makes its own data by `prepare(place)`, whose pages are thus near it; `settle(place)`
    may bind it elsewhere before the work. One turn more comes first and does not count. An error of any thread is raised here.
    """
    barrier = threading.Barrier(len(cpus))
    spans: list[list[tuple[float, float]]] = [[] for _ in cpus]
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            pin(cpus[place])
            data = prepare(place)
            if settle is not None:
                settle(place)
            for turn in range(turns + 1):
                barrier.wait()
                begun = time.perf_counter()
                work(data)
                if turn:
                    spans[place].append((begun, time.perf_counter()))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(cpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in zip(*spans, strict=True)]


def on_thread(cpus: int | Sequence[int], work: Callable[[], Any]) -> Any:
    """What `work` returns on a thread bound to `cpus`: the caller's own binding stays."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            pin(cpus)
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
