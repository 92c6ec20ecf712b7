"""Latency of the host's memory by size, and the levels that show in it.

A load whose address is the value of the load before cannot start early: the time of a chain of them over a set of lines is the latency of
the level that holds the set (McVoy and Staelin 1996, lmbench). The lines follow in random order, which no prefetcher foresees.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hone.measure.probe.buffers import Buffer
from hone.measure.probe.result import LatencyPoint, Level, Sample
from hone.measure.topology.read import Topology

LINE = 64
TURNS = 5
_SMALLEST, _LARGEST = 4 << 10, 1 << 30
_TURN_S, _QUICK_TURN_S = 8e-3, 3e-3
_HUGE_FROM = 1 << 20
"""Sizes from which chains are measured in large pages, too: below it the first table of translations reaches."""
_APART = 1.15
"""Least ratio of the latencies of two levels that have a knee between them."""


def largest_bytes(topology: Topology, memory_bytes: int) -> int:
    """The longest chain: four times the last cache, at least 64 MiB, at most 1 GiB and an eighth of the memory."""
    last = max((one.size_bytes for one in topology.cache_levels()), default=16 << 20)
    return min(max(4 * last, 64 << 20), _LARGEST, memory_bytes // 8)


def sizes(largest: int) -> list[int]:
    """Two sizes an octave, whole lines, from 4 KiB to `largest`."""
    found, size = [], _SMALLEST
    while size <= largest:
        found += [size, size * 3 // 2]
        size *= 2
    return [one for one in found if one < largest] + [largest // LINE * LINE]


class Chain:
    """A cycle of all lines of a buffer in random order."""

    def __init__(self, buffer: Buffer, num_bytes: int, seed: int = 0) -> None:
        from hone.measure.probe import kernels

        self._kernels = kernels
        self.words: Any = buffer.view(np.uint64, num_bytes)
        self.lines = num_bytes // LINE
        order = np.random.default_rng(seed).permutation(self.lines).astype(np.uint64)
        kernels.link(self.words, order)
        self._at = np.uint64(kernels.chase(self.words, np.uint64(0), min(self.lines, 1 << 21)))  # into the caches

    def seconds(self, turn_s: float, turns: int = TURNS) -> Sample:
        """Seconds a load, in each of `turns` turns of about `turn_s`."""
        steps, took = 2000, 0.0
        while (took := self._follow(steps)) < turn_s / 4:
            steps = max(2 * steps, int(steps * turn_s / 2 / max(took, 1e-7)))
        steps = max(1000, int(steps * turn_s / took))
        return Sample.of([self._follow(steps) / steps for _ in range(turns)])

    def _follow(self, steps: int) -> float:
        begun = time.perf_counter()
        self._at = np.uint64(self._kernels.chase(self.words, self._at, steps))
        return time.perf_counter() - begun


def latency_curve(largest: int, *, quick: bool, deadline: float = math.inf) -> list[LatencyPoint]:
    """Latency by size in small pages, and from 1 MiB on in large ones where the kernel gives them.

    After `deadline`, by time.perf_counter(), only the largest size in small pages is still measured.
    """
    turn_s = _QUICK_TURN_S if quick else _TURN_S
    found = []
    for huge in (False, True):
        wanted = [size for size in sizes(largest) if not huge or size >= _HUGE_FROM]
        buffer = Buffer(-(-largest // (2 << 20)) * (2 << 20), huge=huge)
        if huge:
            buffer.view(np.uint8)[::4096] = 1
            if not (given := buffer.huge_bytes()) or given < largest // 2:
                break
        for size in wanted:
            if time.perf_counter() > deadline and (huge or size != wanted[-1]):
                continue
            point = Chain(buffer, size).seconds(turn_s)
            found.append(LatencyPoint(num_bytes=size, seconds=point, huge_pages=huge))
    return found


def register_latency(turns: int = TURNS) -> Sample:
    """Seconds of one dependent operation on registers: a clock tick on most processors."""
    from hone.measure.probe import kernels

    rounds, found = 1_000_000, []
    for _ in range(turns + 1):
        begun = time.perf_counter()
        kernels.register_chain(np.uint64(88172645463325252), rounds)
        found.append((time.perf_counter() - begun) / rounds / 6)
    return Sample.of(found[1:])


def levels_of(topology: Topology, points: Sequence[LatencyPoint], memory_bytes: int | None) -> list[Level]:
    """The caches and memory with the latency of sizes well inside each, and the size where each ends in the measurement.

    Large pages count where they were measured: what a translation costs is not the level's. The knee of a level is where the curve
    crosses the geometric mean of its latency and the next one's, interpolated in the logarithms; None where the two are not apart.
    """
    curve = best_curve(points)
    if not curve:
        return []
    caches = topology.cache_levels()
    ends = [one.size_bytes for one in caches]
    found, below = [], 0
    for cache in caches:
        inside = _inside(curve, below, cache.size_bytes)
        found.append((f"L{cache.level}", cache.size_bytes, inside, _shared(len(cache.cpus))))
        below = cache.size_bytes
    beyond = [point for point in curve if point.num_bytes >= 2 * (ends[-1] if ends else 0)] or curve[-1:]
    found.append(("memory", memory_bytes, _middle(beyond), ""))
    levels = []
    for place, (name, size, sample, note) in enumerate(found):
        following = found[place + 1] if place + 1 < len(found) else None
        turn = None
        if following is not None:
            turn = knee(curve, sample, following[2])
            if not _apart(sample, following[2]):
                note += f"{'; ' * bool(note)}no faster than {following[0]} here: others may fill it, or own it"
        levels.append(Level(name=name, device="host", size_bytes=size, knee_bytes=turn, latency_s=sample, note=note))
    return levels


def best_curve(points: Sequence[LatencyPoint]) -> list[LatencyPoint]:
    """One point a size, in ascending order: that in large pages where there is one."""
    chosen = {point.num_bytes: point for point in sorted(points, key=lambda one: one.huge_pages)}
    return [chosen[size] for size in sorted(chosen)]


def _inside(curve: Sequence[LatencyPoint], below: int, size: int) -> Sample | None:
    """Latency of sizes well inside a cache: above 1.4 times the one before it and up to 0.8 of its own."""
    inside = [point for point in curve if 1.4 * below < point.num_bytes <= 0.8 * size]
    inside = inside or [point for point in curve if below < point.num_bytes <= size]
    return _middle(inside) if inside else None


def _middle(points: Sequence[LatencyPoint]) -> Sample:
    """The middle point by its fastest turn: other work on the machine makes turns slower, never faster."""
    return sorted(points, key=lambda one: one.seconds.low)[len(points) // 2].seconds


def _apart(low: Sample | None, high: Sample | None) -> bool:
    return low is not None and high is not None and high.low >= _APART * low.low


def _shared(cpus: int) -> str:
    return f"shared by {cpus} logical processors" if cpus > 1 else ""


def knee(curve: Sequence[LatencyPoint], low: Sample | None, high: Sample | None) -> int | None:
    """The size where `curve` crosses the geometric mean of two levels' latencies; all by the fastest turn of a point."""
    if not _apart(low, high):
        return None
    assert low is not None and high is not None, "levels that are apart have latencies"
    level = math.sqrt(low.low * high.low)
    for before, after in pairwise(curve):
        first, second = before.seconds.low, after.seconds.low
        if first <= level < second:
            share = math.log(level / first) / math.log(second / first)
            return round(before.num_bytes * (after.num_bytes / before.num_bytes) ** share)
    return None
