"""Noise that depends on (seed, position, token) alone: 64-bit hashes, as numbers and as Gumbel noise.

Legend: E entries (one per token to draw), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1

GUMBEL, ACCEPT, RESIDUAL = 0, 1, 2
"""Streams of noise of one (seed, position): the draw itself, and the two that speculation needs."""


def gumbel(keys: Tensor, hashes: Tensor) -> Tensor:
    """Gumbel noise float64 [E, V] of keys int64 [E] (`noise_keys`) and token hashes int64 [V] (`token_hashes`)."""
    x = hashes ^ keys[:, None]
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):  # MurmurHash3's 64-bit finalizer
        x ^= (x >> 33) & 0x7FFFFFFF
        x *= _signed(multiplier)
    x ^= (x >> 33) & 0x7FFFFFFF
    uniforms = ((x >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return uniforms.log_().neg_().log_().neg_()


def token_hashes(tokens: Tensor) -> Tensor:
    """int64 hashes of tokens int64 [...], which `gumbel` mixes with an entry's key."""
    return _mixed(tokens)


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
