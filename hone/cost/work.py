"""Work: operations, bytes and starts of anything that a machine does, how long it takes there, and which rank does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.cost.roofline import seconds, speed_of_light
from hone.measure.machine import Machine

FP32_SHARE = 0.6
"""Fraction of a GPU's float32 rate on its data sheet that factorization and error products reach."""

FLOPS_PER_BYTE, FLOPS_PER_OP = 12.0, 1e8
"""Float32 operations in the time that a processor moves a byte, and starts an operation, to compare solves by
(H200: 67 TFLOP/s, 4.3 TB/s; between its 5 us a start and the 1 us of two CPU cores)."""

_LARGE = 1 << 28


@dataclass(frozen=True)
class Work:
    """Floating-point operations in float32, bytes moved, tensor operations started: of an estimate in any room."""

    flops: float = 0.0
    num_bytes: float = 0.0
    num_ops: float = 0.0
    temporaries: float = 6.0
    """Float32 tensors of the size of what it works on that exist at once."""
    squares: float = 0.0
    """Float32 tensors [K, K] of a matrix with K columns that exist at once while it makes a factor of the sum of x x^T, beside that sum."""
    on_gpu: Work | None = None
    """The work on a GPU, where its bytes and operations differ: no cache holds what it moves, and kernels start less often."""

    def on_device(self, device: str) -> Work:
        """The work on `device`."""
        return self.on_gpu if self.on_gpu is not None and device.startswith("cuda") else self


def work_seconds(machine: Machine, work: Work) -> float:
    """Seconds of `work` on the device of `machine`, one kind after the other."""
    work = work.on_device(machine.device)
    return products_s(machine, work.flops) + moved_s(machine, work.num_bytes) + started_s(machine, work.num_ops)


def share_out(works: Sequence[Sequence[Work]], num_ranks: int, device: str) -> list[int]:
    """The rank that does each of `works`, what is done of one piece: by shapes alone, so that all ranks agree."""
    costs = []
    for steps in works:
        here = [step.on_device(device) for step in steps]
        costs.append(sum(one.flops + FLOPS_PER_BYTE * one.num_bytes + FLOPS_PER_OP * one.num_ops for one in here))
    return balanced(costs, num_ranks)


def balanced(costs: Sequence[float], num_ranks: int) -> list[int]:
    """The rank of each of `costs`: the largest first, each to the rank with least so far."""
    taken, ranks = [0.0] * num_ranks, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        rank = min(range(num_ranks), key=lambda rank: (taken[rank], rank))
        ranks[place] = rank
        taken[rank] += costs[place]
    return ranks


def moved_s(machine: Machine, num_bytes: float) -> float:
    """Seconds of passes over tensors that do not fit a cache."""
    return seconds(machine, num_bytes=num_bytes, op_bytes=_LARGE).value


def started_s(machine: Machine, num_ops: float) -> float:
    """Seconds of starting so many tensor operations."""
    return seconds(machine, num_ops=num_ops).value


def products_s(machine: Machine, flops: float) -> float:
    """Seconds of products and factorizations in float32."""
    calibration = machine.calibration
    if calibration is not None and "float32" in calibration.dtypes:
        return seconds(machine, flops=flops).value
    return flops / (FP32_SHARE * speed_of_light(machine, "float32")[0])
