"""Measured seconds of collectives by size, of the backend and of the readable algorithms, for the calibration file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.measure.calibration import CollectiveTime
from hone.parallel.axis import Axis, Transfer
from hone.parallel.collectives import halving, ring, tree

SIZES = {"cpu": tuple(4 << 10 + 2 * step for step in range(7)), "cuda": tuple(4 << 10 + 2 * step for step in range(9))}
"""Bytes of the tensor: 4 KiB to 16 MiB on CPUs, to 256 MiB on GPUs."""

_BESIDE_BYTES, _BESIDE_S = 256 << 20, 0.3
"""Bytes of a sum that passes beside products, and seconds of each of their measurements."""

_TRIES = (3, 20)
"""Least and most tries of a collective."""


def measure(
    mesh: Mesh, device: str, *, sizes: Sequence[int] | None = None, budget_s: float = 0.1
) -> list[CollectiveTime]:
    """The median seconds of each collective of float32 tensors; every rank of `mesh` calls it inside `mesh.together`.

    On all ranks, and on halves, quarters, ... of them at the same time, as groups of a training use them. `budget_s` is for one
    collective of one size. A try begins when all ranks have met, and ends when the last one has ended.
    """
    kind, rows, ranks = ("cuda" if device.startswith("cuda") else "cpu"), [], mesh.world_size
    with mesh.transfers():
        while ranks > 1:
            lines = [list(range(first, first + ranks)) for first in range(0, mesh.world_size, ranks)]
            line = next(one for one in lines if mesh.rank in one)
            axis = Axis(line, mesh.rank, mesh.group(lines, device), mesh.broken)
            for num_bytes in sizes or SIZES[kind]:
                x = torch.ones(-(-num_bytes // 4 // ranks) * ranks, device=device)
                for (op, algorithm), work in _works(axis, x).items():
                    seconds = _typical(mesh, device, work, budget_s)
                    rows.append(
                        CollectiveTime(op=op, algorithm=algorithm, ranks=ranks, num_bytes=4 * len(x), seconds=seconds)
                    )
                    x.fill_(1.0)
            ranks = ranks // 2 if ranks % 2 == 0 else 1
    return rows


def measure_beside(mesh: Mesh, device: str) -> float | None:
    """Of sums that pass beside matrix products, the part of their seconds by which both together take longer than the products.

    0: neither slows the other; 1: they might as well take turns. On GPUs they share multiprocessors, memory and power. None on
    CPUs, where nothing is planned to pass beside products. Every rank of `mesh` calls it inside `mesh.together`.
    """
    if not device.startswith("cuda"):
        return None
    size, count = 8192, 8
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    with mesh.transfers():
        line = list(range(mesh.world_size))
        axis = Axis(line, mesh.rank, mesh.group([line], device), mesh.broken)
        whole = [torch.ones(len(line), _BESIDE_BYTES // 4 // len(line), device=device) for _ in range(2)]
        part = [torch.empty_like(one) for one in whole]

        def move() -> None:
            moving = [axis.all_to_all(part[turn % 2], whole[turn % 2]) for turn in range(count)]
            for one in moving:
                _wait(one)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(left, right, out=product)

        def both() -> None:
            moving = [axis.all_to_all(part[turn % 2], whole[turn % 2]) for turn in range(count)]
            multiply(times)
            for one in moving:
                _wait(one)

        moved = _typical(mesh, device, move, _BESIDE_S)
        once = _typical(mesh, device, lambda: multiply(4), _BESIDE_S) / 4
        times = max(4, round(2 * moved / once))  # twice as long, as a step's products beside its sums
        alone = _typical(mesh, device, lambda: multiply(times), _BESIDE_S)
        together = _typical(mesh, device, both, _BESIDE_S)
    return min(max((together - alone) / moved, 0.0), 1.0)


def _works(axis: Axis, x: Tensor) -> dict[tuple[str, str], Callable[[], object]]:
    """The collectives of x by (op, algorithm)."""
    part, rows = x[: len(x) // axis.size].clone(), x[: len(x) // axis.size * axis.size].view(axis.size, -1)
    other = torch.empty_like(rows)
    return {
        ("all_reduce", "backend"): lambda: _wait(axis.all_reduce(x)),
        ("reduce_scatter", "backend"): lambda: _wait(axis.reduce_scatter(part, x)),
        ("all_gather", "backend"): lambda: _wait(axis.all_gather(x, part)),
        ("all_to_all", "backend"): lambda: _wait(axis.all_to_all(other, rows)),
        ("all_reduce", "ring"): lambda: ring.all_reduce(axis, x),
        ("reduce_scatter", "ring"): lambda: ring.reduce_scatter(axis, x),
        ("all_gather", "ring"): lambda: ring.all_gather(axis, x),
        ("all_reduce", "halving"): lambda: halving.all_reduce(axis, x),
        ("all_reduce", "doubling"): lambda: halving.doubling(axis, x),
        ("all_reduce", "tree"): lambda: tree.all_reduce(axis, x),
    }


def _wait(moving: Transfer | None) -> None:
    if moving is not None:
        moving.wait()


def _typical(mesh: Mesh, device: str, work: Callable[[], object], budget_s: float) -> float:
    """Median over the tries of the slowest rank's seconds; the same number on every rank."""
    tries: list[float] = []
    work()  # connections, kernels
    while len(tries) < _TRIES[0] or (sum(tries) < budget_s and len(tries) < _TRIES[1]):
        mesh.gather(None)
        begun = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        tries.append(max(mesh.gather(time.perf_counter() - begun)))
    return statistics.median(tries)
