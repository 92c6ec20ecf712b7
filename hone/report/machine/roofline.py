"""The roofline of one device and where the product's own operations stand under it. Williams, Waterman and Patterson 2009.

An operation of `i` FLOPs a byte can run at most at min(peak, i * bandwidth). Bytes are those of each operand and result once: what an
operation must move when no cache holds any of it; one whose operands a cache does hold may stand above the slope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Point:
    """One measured operation."""

    name: str
    dtype: str
    intensity: float
    """FLOPs a byte."""
    flops_per_s: float
    share: float
    """Of what the roof allows there."""


@dataclass(frozen=True)
class Roof:
    """The roof of one dtype: the best product measured, and the bandwidth of reading memory."""

    dtype: str
    peak_flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which arithmetic, no more memory, is the limit."""
        return self.peak_flops_per_s / self.bytes_per_s

    def at(self, intensity: float) -> float:
        """The most FLOP/s at an intensity."""
        return min(self.peak_flops_per_s, intensity * self.bytes_per_s)


def roofs(calibration: dict[str, Any]) -> list[Roof]:
    """A roof a dtype of known size, the lowest peak first."""
    peaks: dict[str, float] = {}
    for row in calibration.get("matmuls") or ():
        if row["dtype"] in BYTES:
            peaks[row["dtype"]] = max(peaks.get(row["dtype"], 0.0), row["flops_per_s"])
    found = [Roof(dtype, peak, calibration["read_bytes_per_s"]) for dtype, peak in peaks.items()]
    return sorted(found, key=lambda one: one.peak_flops_per_s)


def points(calibration: dict[str, Any]) -> list[Point]:
    """The linears and attentions of a calibration."""
    by_dtype = {roof.dtype: roof for roof in roofs(calibration)}
    found = []

    def add(name: str, dtype: str, intensity: float, rate: float) -> None:
        if dtype in by_dtype:
            found.append(Point(name, dtype, intensity, rate, rate / by_dtype[dtype].at(intensity)))

    for row in calibration.get("matmuls") or ():
        m, n, k = row["m"], row["n"], row["k"]
        what = {"forward": "linear", "input_gradient": "its input gradient", "weight_gradient": "its weight gradient"}
        name = f"{what.get(row.get('layout', 'forward'), 'product')} {m} x {n} x {k}"
        size = BYTES.get(row["dtype"], 4) * (m * k + k * n + m * n)
        add(name, row["dtype"], 2 * m * n * k / size, row["flops_per_s"])
    for row in calibration.get("attentions") or ():
        # Causal: 2 s^2 d FLOPs a head (4 a kept pair and value), and q, k, v and the output once.
        tokens = row.get("seq_len", 256)
        intensity = tokens / (2 * BYTES.get(row["dtype"], 4))
        add(f"attention over {tokens:,} tokens", row["dtype"], intensity, row["forward_flops_per_s"])
    return found
