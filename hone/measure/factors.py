"""Probes of Cholesky factors, of which compression makes one for each matrix of sums: their rate grows with the size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.measure.calibration import FactorRate
from hone.measure.timer import Probe

FACTOR = "factor"
"""First part of the names of probes: (FACTOR, columns)."""


def factor_probes(device: str, sizes: Sequence[int]) -> dict[Hashable, Probe]:
    """A probe of the factor of a float32 [K, K] for each of `sizes`, of K^3 / 3 FLOPs."""
    return {(FACTOR, size): _probe(device, size) for size in sizes}


def _probe(device: str, size: int) -> Probe:
    made: list[Tensor] = []

    def work() -> object:
        if not made:
            made.append(definite(device, size))
        return torch.linalg.cholesky_ex(made[0])

    return Probe(work, size**3 / 3, 0.1)


def definite(device: str, size: int) -> Tensor:
    """A positive definite float32 [K, K]: noise, whose spectrum is within 2 (2 K)^(1/2), and more than that on the diagonal."""
    found = torch.randn(size, size, device=device)
    found = found + found.T
    found.diagonal().add_(4.0 * (2.0 * size) ** 0.5)
    return found


def factor_rates(rate: Callable[[Hashable], float], names: Sequence[Any]) -> tuple[FactorRate, ...]:
    """The measured rates by size."""
    return tuple(FactorRate(columns=name[1], flops_per_s=rate(name)) for name in names if name[0] == FACTOR)
