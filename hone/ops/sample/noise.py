"""Noise that depends on (seed, position, token) alone: 64-bit hashes, as numbers and as Gumbel noise.

Legend: E entries (one per token to draw), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1

GUMBEL, ACCEPT, RESIDUAL = 0, 1, 2
"""Streams of noise of one (seed, position): the draw itself, and the two that speculation needs."""


def gumbel(keys: Tensor, hashes: Tensor) -> Tensor:
    """Gumbel noise float32 [E, V] of keys int64 [E] (`noise_keys`) and token hashes int64 [V] (`token_hashes`).

    A hash of 32 bits, mixed with both halves of the key (the multipliers and shifts are Wellons' lowbias32), is a uniform
    number v; the noise is -log(-log(1 - v)). Small v decide draws: they have float32's full relative precision. Noise is
    between -2.82 and 22.9.
    """
    low, high = (keys & _MASK_32)[:, None], ((keys >> 32) & _MASK_32)[:, None]
    x = hashes ^ low
    x ^= x >> 16
    x.mul_(0x7FEB352D).bitwise_and_(_MASK_32)
    x ^= x >> 15
    x ^= high
    x.mul_(0x846CA68B).bitwise_and_(_MASK_32)
    x ^= x >> 16
    uniforms = x.float().mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return uniforms.neg_().log1p_().neg_().log_().neg_()


def token_hashes(tokens: Tensor) -> Tensor:
    """int64 hashes (32 bits, distinct) of tokens int64 [...], which `gumbel` mixes with an entry's key."""
    return tokens * 0x9E3779B1 & _MASK_32


def noise_keys(
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    streams: Sequence[int] | int = GUMBEL,
    device: torch.device | str | None = None,
) -> Tensor:
    """int64 [E]: one key for each (seed, position, stream), on `device`.

    Python seeds may be any integers (the low 64 bits are used); tensors are int64 and stay on their device, so that a
    captured graph can compute its keys.
    """
    if isinstance(seeds, Tensor) and isinstance(positions, Tensor):
        return _mixed(_mixed(_mixed(seeds) ^ positions) ^ streams)
    each = [streams] * len(seeds) if isinstance(streams, int) else streams
    keys = [_signed(_key(int(seed), int(place), stream)) for seed, place, stream in zip(seeds, positions, each)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def uniform(seed: int, position: int, stream: int) -> float:
    """A number in (0, 1) that depends on its arguments alone."""
    return ((_mix(_key(seed, position, stream)) >> 11) + 0.5) * 2.0**-53


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64 of int64 numbers as 64 bits; `_mix` on a device."""
    x = values + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix(value: int) -> int:
    """SplitMix64 of one number. Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    return _mix(_mix(_mix(seed & _MASK) ^ position) ^ stream)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
