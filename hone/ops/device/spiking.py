"""Spiking neurons that carry a linear's input: how many spikes a number becomes in T steps, and the product of their sums."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Code = Literal["rate", "binary"]


def thresholds(x: Tensor, percentile: float) -> Tensor:
    """[T, 1]: the magnitude below which `percentile` percent of each token's K inputs lie, which all spikes of a neuron together carry."""
    found = torch.quantile(x.abs().float(), percentile / 100.0, dim=-1, keepdim=True)
    return found.masked_fill(found == 0, 1.0)


def fire(x: Tensor, most: Tensor, steps: int, code: Code) -> Tensor:
    """Spikes [steps, T, K] in {-1, 0, 1} of integrate-and-fire neurons whose input is x [T, K] and which carry at most +-`most` [T, 1].

    `rate`: a step's spike is worth most / steps; a neuron starts half a spike full, gets its input at every step and fires where it
    reaches a spike, so that the sum is the input rounded to steps levels a side (Diehl et al. 2015,
    doi:10.1109/IJCNN.2015.7280696, with the half spike of Bu et al. 2022, arXiv:2303.04347). `binary`: spike t is worth
    2**(steps - 1 - t) of the smallest, so that the sum is exactly a code of `steps` bits and a sign.
    """
    levels = steps if code == "rate" else 2**steps - 1
    full = (x.float() / most).clamp(-1.0, 1.0) * levels
    if code == "binary":
        size, sign = full.abs().round(), full.sign()
        bits = [sign * ((size / 2 ** (steps - 1 - t)).floor() % 2) for t in range(steps)]
        return torch.stack(bits)
    spikes, potential, sign = [], torch.full_like(full, 0.5), full.sign()
    for _ in range(steps):
        potential = potential + full.abs() / steps
        fired = (potential >= 1.0 - 1e-6).to(full.dtype)
        potential = potential - fired
        spikes.append(sign * fired)
    return torch.stack(spikes)


def spike_values(most: Tensor, steps: int, code: Code) -> Tensor:
    """[steps, T, 1]: what one spike of each step is worth."""
    if code == "rate":
        return (most / steps).expand(steps, *most.shape)
    weights = 2.0 ** torch.arange(steps - 1, -1, -1, device=most.device, dtype=most.dtype)
    return weights.view(-1, *(1,) * most.dim()) * most / (2**steps - 1)


def spiking_linear(x: Tensor, weight: Tensor, *, steps: int, code: Code, percentile: float) -> tuple[Tensor, Tensor]:
    """x [T, K] as spikes times weight [N, K]: [T, N] float32, and the number of spikes (int64). Each spike adds N weights.

    Membranes of the outputs only add up, so the sum over steps is taken before the product.
    """
    most = thresholds(x, percentile)
    spikes = fire(x, most, steps, code)
    carried = (spikes * spike_values(most, steps, code)).sum(0)
    return carried @ weight.float().T, spikes.abs().sum(dtype=torch.float64).long()
