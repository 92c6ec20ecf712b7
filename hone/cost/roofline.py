"""Seconds of an operation: the larger of arithmetic and memory traffic at this machine's measured rates."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache
from typing import Any

from hone.base.figure import Estimate
from hone.cost.catalogue.read import catalogue
from hone.measure.calibration import Calibration, Layout, LinearRate, MatmulRate
from hone.measure.machine import Machine

NEAREST = 3
"""Number of calibrated shapes that a rate is interpolated from."""

# Upper bound of an uncalibrated core: 4 GHz, two 16-wide fused multiply-adds per cycle (AVX-512), or one 2,048-operation
# tile product (AMX) in two-byte dtypes; 40 GB/s is more than the load buffers of one core sustain.
_CORE_FLOPS_PER_S = {"float64": 128e9, "float32": 256e9}
_CORE_TILE_FLOPS_PER_S = 8192e9
_CORE_BYTES_PER_S = 40e9


def seconds(
    machine: Machine,
    *,
    flops: float = 0.0,
    num_bytes: float = 0.0,
    num_ops: float = 0.0,
    dtype: str = "float32",
    matmul: tuple[int, int, int] | None = None,
    layout: Layout = "forward",
    op_bytes: float | None = None,
) -> Estimate:
    """max(flops / rate, bytes / bandwidth) + operations x overhead, at the rates of `machine.calibration`.

    `matmul` = (m, n, k) looks the rate up among products of that shape and `layout` (and sets `flops` when it is 0);
    without it the rate is the best one calibrated. `num_bytes` counts reads and writes; `op_bytes` is the
    traffic of one of the operations (default: all), which decides whether it fits a cache. Without a calibration for
    `dtype` the result is a bound from data-sheet peaks, marked as such.
    """
    if matmul is not None and not flops:
        flops = 2.0 * matmul[0] * matmul[1] * matmul[2]
    calibration = machine.calibration
    if calibration is None or (flops and dtype not in calibration.dtypes):
        return _bound(machine, flops, num_bytes, dtype)
    compute_s, how = 0.0, []
    if flops:
        rate = matmul_rate(calibration, dtype, matmul, layout)
        compute_s = flops / rate
        how.append(f"{flops:.3g} FLOP at {rate / 1e9:,.1f} GFLOP/s")
    memory_s = 0.0
    if num_bytes:
        bandwidth = copy_rate(calibration, op_bytes or num_bytes)
        memory_s = num_bytes / bandwidth
        how.append(f"{num_bytes:.3g} B at {bandwidth / 1e9:,.1f} GB/s")
    formula = f"max({', '.join(how)})" if len(how) == 2 else "".join(how)
    if num_ops:
        formula += f"{' + ' if how else ''}{num_ops:,.0f} operations x {calibration.op_s * 1e6:.1f} us"
    value = max(compute_s, memory_s) + num_ops * calibration.op_s
    return Estimate(value=value, unit="s", formula=f"{formula} ({calibration.device}, calibrated)")


def matmul_rate(
    calibration: Calibration, dtype: str, shape: tuple[int, int, int] | None, layout: Layout = "forward"
) -> float:
    """FLOP/s of an [m, k] by [k, n] product: mean of the nearest calibrated shapes, weighted by distance in log space."""
    rates = [rate for rate in calibration.matmuls if rate.dtype == dtype]
    assert rates, f"calibration has no {dtype}"
    if shape is None:
        return max(rate.flops_per_s for rate in rates)
    return _weighted([(gap, rate.flops_per_s) for rate, gap in _gaps(calibration, dtype, shape, layout)])


def _gaps(
    calibration: Calibration, dtype: str, shape: tuple[int, int, int], layout: Layout
) -> list[tuple[MatmulRate, float]]:
    """The calibrated products of `layout` (of any layout if it has none) and the distance of `shape` from each, in doublings."""
    rates = [rate for rate in calibration.matmuls if rate.dtype == dtype]
    found = []
    for rate in [rate for rate in rates if rate.layout == layout] or rates:
        found.append((rate, _distance(shape, rate)))
    return found


def _distance(shape: tuple[int, int, int], rate: MatmulRate | LinearRate) -> float:
    """How far `shape` is from the one that was measured, in doublings."""
    return math.hypot(
        *(math.log2(max(one, 1) / other) for one, other in zip(shape, (rate.m, rate.n, rate.k), strict=True))
    )


def matmul_seconds(
    machine: Machine, shape: tuple[int, int, int], layout: Layout, num_bytes: float, dtype: str
) -> float:
    """Seconds of an [m, k] by [k, n] product that moves `num_bytes`: arithmetic or traffic, whichever is more.

    Between the shapes calibrated on a GPU the reached fraction of the roofline is interpolated, not the rate: with few rows a
    product is bound by reading its weight, and its rate is proportional to the rows.
    """
    calibration = machine.calibration
    if calibration is None or dtype not in calibration.dtypes or not machine.device.startswith("cuda"):
        return seconds(machine, matmul=shape, layout=layout, num_bytes=num_bytes, dtype=dtype).value
    peak, read = matmul_rate(calibration, dtype, None), calibration.read_bytes_per_s
    flops = 2.0 * math.prod(shape)
    width = num_bytes / (shape[0] * shape[1] + shape[0] * shape[2] + shape[1] * shape[2])
    near = []
    for rate, gap in _gaps(calibration, dtype, shape, layout):
        moved = width * (rate.m * rate.n + rate.m * rate.k + rate.n * rate.k)
        roof_s = max(2.0 * rate.m * rate.n * rate.k / peak, moved / read)
        near.append((gap, roof_s * rate.flops_per_s / (2.0 * rate.m * rate.n * rate.k)))
    return max(flops / (peak * lasting(machine, dtype)), num_bytes / read) / _weighted(near)


def copy_rate(calibration: Calibration, num_bytes: float) -> float:
    """Bytes/s when `num_bytes` are touched, from the calibrated sizes around it; beyond the largest, its rate."""
    size = min(max(num_bytes, 1), max(copy.num_bytes for copy in calibration.copies))
    near = [(abs(math.log2(size / copy.num_bytes)), copy.bytes_per_s) for copy in calibration.copies]
    return _weighted(near)


def attention_seconds(
    machine: Machine, flops: float, dtype: str, *, train: bool = False, seq_len: int | None = None
) -> float:
    """Causal attention of `flops` forward FLOPs (visible pairs only); with `train` its backward pass too.

    At the rate of sequences of `seq_len` (None: the longest calibrated), on a GPU as it lasts. Without a calibration the
    data-sheet rate, with 3.5 times the FLOPs for training (FlashAttention-2, arXiv:2307.08691).
    """
    calibration = machine.calibration
    rates = [rate for rate in calibration.attentions if rate.dtype == dtype] if calibration is not None else []
    if not rates:
        return flops * (3.5 if train else 1.0) / speed_of_light(machine, dtype)[0]
    points = sorted((one.seq_len, one.train_flops_per_s if train else one.forward_flops_per_s) for one in rates)
    return flops / (between(points, seq_len or points[-1][0]) * lasting(machine, dtype))


def lasting(machine: Machine, dtype: str) -> float:
    """The rate of arithmetic in a step, as a fraction of the calibrated rates of calls on their own: a GPU's power is limited."""
    return machine.calibration.sustained.get(dtype, 1.0) if machine.calibration is not None else 1.0


RESTING_POWER = 0.5
"""Power of a GPU that waits, as a fraction of its limit; assumed."""


def waits_s(machine: Machine, dtype: str, busy_s: float, waits: float) -> float:
    """Seconds that a step of `busy_s` takes longer because it waits `waits` seconds in between, at the rates of `lasting`.

    Where power limits the rate, what a waiting GPU does not use raises its clock afterwards, at most to that of calls on their own.
    """
    regained = min((1 - RESTING_POWER) * waits, (1 - lasting(machine, dtype)) * busy_s)
    return waits - regained


def between(points: list[tuple[int, float]], size: float) -> float:
    """The rate at `size` between two of `points` in ascending order, linear in logarithms; outside the nearest one's."""
    sizes = [point[0] for point in points]
    place = bisect_right(sizes, size)
    if place in (0, len(points)):
        return points[max(place - 1, 0)][1]
    (smaller, before), (larger, after) = points[place - 1 : place + 1]
    share = math.log(size / smaller) / math.log(larger / smaller)
    return before ** (1 - share) * after**share


def linear_seconds(
    machine: Machine, shape: tuple[int, int, int], recipe: str, *, held: bool, trained: bool
) -> float | None:
    """Seconds of an fp8 linear on [m, k] with [n, k] weights, with all its casts: forward, or `trained` with the backward pass.

    `held`: the weight's codes are there. None where `recipe` was not calibrated.
    """
    calibration, passes = machine.calibration, "trained" if trained else "forward"
    rates = [] if calibration is None else calibration.fp8
    near = []
    for rate in rates:
        if (rate.recipe, rate.held, rate.passes) == (recipe, held, passes):
            least = _coded_rate(machine, rate)
            near.append((_distance(shape, rate), max(rate.flops_per_s, least)))
    if not near:
        return None
    return (6.0 if trained else 2.0) * math.prod(shape) / (_weighted(near) * lasting(machine, "float8"))


def _coded_rate(machine: Machine, rate: LinearRate) -> float:
    """FLOP/s that an fp8 linear's kernels reach at least: those of a bf16 product, with a read of 4 bytes and a write of 2 codes for each number that
    is cast. One that was measured slower waited for its launches, which a step counts apart (or does not have, as a CUDA graph)."""
    calibration = machine.calibration
    if calibration is None or "bfloat16" not in calibration.dtypes or not machine.device.startswith("cuda"):
        return 0.0
    m, n, k = rate.m, rate.n, rate.k
    trained = rate.passes == "trained"
    products: list[tuple[tuple[int, int, int], Layout]] = [((m, n, k), "forward")]
    products += [((m, k, n), "input_gradient"), ((n, k, m), "weight_gradient")] if trained else []
    took = sum(matmul_seconds(machine, shape, layout, 2.0 * _sides(*shape), "bfloat16") for shape, layout in products)
    cast = m * k + (m * n if trained else 0) + (0 if rate.held else n * k)
    return (6.0 if trained else 2.0) * m * n * k / (took + 6.0 * cast / calibration.read_bytes_per_s)


def _sides(m: int, n: int, k: int) -> int:
    """Numbers of a product's factors and result."""
    return m * n + m * k + n * k


def kernel_rate(machine: Machine, kernel: str, dtype: str, num_bytes: float) -> float | None:
    """Bytes/s of one of a training's kernels, else of a copy of `num_bytes`; None without a calibration."""
    calibration = machine.calibration
    if calibration is None:
        return None
    return calibration.kernel_bytes_per_s(kernel, dtype) or copy_rate(calibration, num_bytes)


def _weighted(near: list[tuple[float, float]]) -> float:
    """Geometric mean of the rates of the NEAREST points, weighted by 1 / distance^2; an exact match is returned alone."""
    near = sorted(near)[:NEAREST]
    if near[0][0] < 1e-6:
        return near[0][1]
    weights = [1.0 / distance**2 for distance, _ in near]
    mean = sum(weight * math.log(rate) for weight, (_, rate) in zip(weights, near, strict=True)) / sum(weights)
    return math.exp(mean)


def _bound(machine: Machine, flops: float, num_bytes: float, dtype: str) -> Estimate:
    """Lower bound of seconds on `machine`, from the data sheet of its GPU or the upper bound of a CPU core."""
    peak, bandwidth, source = speed_of_light(machine, dtype)
    value = max(flops / peak, num_bytes / bandwidth)
    formula = (
        f"bound: max({flops:.3g} FLOP at {peak / 1e12:,.2f} TFLOP/s, {num_bytes:.3g} B at {bandwidth / 1e9:,.0f} GB/s) "
        f"of {source}; this machine is not calibrated for {dtype} (`hone calibrate`)"
    )
    return Estimate(value=value, unit="s", formula=formula, bound=True)


def speed_of_light(machine: Machine, dtype: str) -> tuple[float, float, str]:
    """(FLOP/s, bytes/s, source) that `machine` cannot exceed."""
    if machine.device.startswith("cuda"):
        return _gpu_light(machine.processor, dtype)
    core = _CORE_FLOPS_PER_S.get(dtype, _CORE_TILE_FLOPS_PER_S)
    source = f"{machine.num_cores} CPU cores at {core / 1e9:,.0f} GFLOP/s and {_CORE_BYTES_PER_S / 1e9:.0f} GB/s each"
    return machine.num_cores * core, machine.num_cores * _CORE_BYTES_PER_S, source


@cache
def _gpu_light(processor: str, dtype: str) -> tuple[float, float, str]:
    """(FLOP/s, bytes/s, source) of a GPU by its data sheet, of an unknown one by the fastest that are sold."""
    row = catalogue().of_processor(processor)
    found = row.rate(dtype) if row is not None else None
    if row is not None and found is not None and row.bytes_per_s is not None:
        widened = "" if found[1] == dtype else f" (it has no {dtype}: the rate of {found[1]})"
        return found[0], row.bytes_per_s, f"the data sheet of {row.name}{widened}"
    sold = [one for one in catalogue().accelerators if one.kind == "gpu" and not one.announced]
    rates = {one.name: (one.rate(dtype) or (0.0, ""))[0] for one in sold}
    fastest = max(sold, key=lambda one: rates[one.name])
    read = max(one.bytes_per_s or 0.0 for one in sold)
    lack = "is not listed" if row is None else f"is listed without a rate for {dtype} or without its memory's"
    return rates[fastest.name], read, f"the data sheet of {fastest.name} ({processor} {lack})"


@cache
def data_sheets() -> list[dict[str, Any]]:
    """The catalogue's GPUs in short: name, a part of what the driver reports, memory, dense FLOP/s by number format, bytes/s."""
    fields = ("name", "memory_bytes", "bytes_per_s", "flops_per_s")
    return [
        {"match": row.match.partition("|")[0], **{field: getattr(row, field) for field in fields}}
        for row in catalogue().accelerators
        if row.kind == "gpu" and row.match and row.memory_bytes is not None and row.bytes_per_s is not None
    ]
