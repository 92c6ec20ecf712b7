"""Work: operations, bytes and starts of anything that a machine does, how long it takes there, and which rank does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.cost.roofline import between, matmul_rate, seconds, speed_of_light
from hone.measure.machine import Machine

FP32_SHARE = 0.75
"""Fraction of a GPU's float32 rate on its data sheet that large products reach (H200: 50 of 67 TFLOP/s)."""

FACTORED = ((1024, 0.02), (2048, 0.08), (4096, 0.25), (8192, 0.41), (14336, 0.62))
"""(K, rate of a Cholesky factor [K, K] as a fraction of large float32 products) where a GPU's calibration has none: H200, torch 2.11. Its
blocks wait for each other, so that small ones do not keep a GPU busy."""

FLOPS_PER_BYTE, FLOPS_PER_OP = 12.0, 1e8
"""Float32 operations in the time that a processor moves a byte, and starts an operation, to compare solves by
(H200: 67 TFLOP/s, 4.3 TB/s; between its 5 us a start and the 1 us of two CPU cores)."""

DEQUANTIZE_BYTES = 80.0
"""Bytes a weight of unpacking codes and multiplying scales in torch, at the rate of a large copy (two-core AMD EPYC: 10 ns; on
another 4 ns for NF4 to 10 for 4-bit integers)."""

_LARGE = 1 << 28


@dataclass(frozen=True)
class Work:
    """Floating-point operations in float32, bytes moved, tensor operations started: of an estimate in any room."""

    flops: float = 0.0
    products: tuple[tuple[float, int, int, int], ...] = ()
    """(how many, m, n, k) of products whose shape decides their rate, beside `flops`, those of large ones."""
    factored: int = 0
    """Columns of the Cholesky factor that it makes; 0: none."""
    num_bytes: float = 0.0
    num_ops: float = 0.0
    temporaries: float = 6.0
    """Float32 tensors of the size of what it works on that exist at once."""
    squares: float = 0.0
    """Float32 tensors [K, K] of a matrix with K columns that exist at once while it makes a factor of the sum of x x^T, beside that sum."""
    on_gpu: Work | None = None
    """The work on a GPU, where its bytes and operations differ: no cache holds what it moves, and kernels start less often."""

    @property
    def all_flops(self) -> float:
        """Operations of all products and of the factor."""
        return self.flops + sum(2.0 * count * m * n * k for count, m, n, k in self.products) + self.factored**3 / 3

    def on_device(self, device: str) -> Work:
        """The work on `device`."""
        return self.on_gpu if self.on_gpu is not None and device.startswith("cuda") else self


def work_seconds(machine: Machine, work: Work) -> float:
    """Seconds of `work` on the device of `machine`: one kind after the other, but that a GPU computes while operations are started."""
    work = work.on_device(machine.device)
    computed = products_s(machine, work.flops) + factor_s(machine, work.factored) + moved_s(machine, work.num_bytes)
    computed += sum(products_s(machine, 2.0 * count * m * n * k, (m, n, k)) for count, m, n, k in work.products)
    started = started_s(machine, work.num_ops)
    return max(computed, started) if machine.device.startswith("cuda") else computed + started


def share_out(works: Sequence[Sequence[Work]], num_ranks: int, device: str) -> list[int]:
    """The rank that does each of `works`, what is done of one piece: by shapes alone, so that all ranks agree."""
    costs = []
    for steps in works:
        here = [step.on_device(device) for step in steps]
        costs.append(sum(one.all_flops + FLOPS_PER_BYTE * one.num_bytes + FLOPS_PER_OP * one.num_ops for one in here))
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


def products_s(machine: Machine, flops: float, shape: tuple[int, int, int] | None = None) -> float:
    """Seconds of products in float32 of `shape` (m, n, k); None: of large ones."""
    calibration = machine.calibration
    if calibration is not None and "float32" in calibration.dtypes:
        return seconds(machine, flops=flops, matmul=shape).value if flops else 0.0
    return flops / (FP32_SHARE * speed_of_light(machine, "float32")[0])


def factor_s(machine: Machine, columns: int) -> float:
    """Seconds of a Cholesky factor [K, K] in float32: at the calibrated rates by size, on a GPU without any at FACTORED; on a CPU as a product."""
    calibration, flops = machine.calibration, columns**3 / 3
    points = [] if calibration is None else [(one.columns, one.flops_per_s) for one in calibration.factors]
    if not points and machine.device.startswith("cuda"):
        known = calibration is not None and "float32" in calibration.dtypes
        large = (
            matmul_rate(calibration, "float32", None) if known else FP32_SHARE * speed_of_light(machine, "float32")[0]
        )
        points = [(size, share * large) for size, share in FACTORED]
    return flops / between(points, columns) if points and columns else products_s(machine, flops)
