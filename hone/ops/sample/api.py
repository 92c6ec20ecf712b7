"""Sampling from logits: filters, and noise that depends on (seed, position, token) alone, never on the batch.

A draw is Gumbel-max: argmax of logits + noise, with the noise of each (seed, position, token) a hash of the three. So a
seeded request gives the same text in any company, and no softmax is needed. Legend: E entries (one per token to
choose), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of

_MASK = (1 << 64) - 1

GUMBEL, ACCEPT, RESIDUAL = 0, 1, 2
"""Streams of noise of one (seed, position): the draw itself, and the two that speculation needs."""


def sample(
    logits: Tensor,
    temperature: Tensor | Sequence[float] | float,
    top_k: Tensor | Sequence[int] | int | None = None,
    top_p: Tensor | Sequence[float] | float | None = None,
    min_p: Tensor | Sequence[float] | float | None = None,
    *,
    keys: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Tokens int64 [E] drawn from logits [E, V] (float32, or a half whose values are taken as they are).

    Each option is one number or one an entry: `temperature` 0 takes the most likely token; of the logits divided by it
    min_p keeps those of at least that share of the largest's probability, then top_k that many, then top_p the most
    likely ones up to that mass (None, or top_k 0 or V, top_p 1, min_p 0: everything). `keys` int64 [E] come from
    `noise_keys`: entry e's noise depends on keys[e] and the token alone. Of equal scores the first token wins.
    Raises SpecError naming what does not fit; options in tensors are not looked at, since a GPU would have to wait.
    """
    if logits.dim() != 2 or keys.shape != logits.shape[:1] or not logits.shape[1]:
        raise SpecError(
            f"logits {tuple(logits.shape)} and keys {tuple(keys.shape)} must be [E, V] and [E]",
            fix="give a row of at least one logit for each token to draw, and a key a row (noise_keys makes them)",
        )
    if not logits.is_floating_point() or keys.dtype != torch.int64:
        raise SpecError(
            f"logits are {logits.dtype} and keys {keys.dtype}, not floating and int64",
            fix="give logits as the model makes them, and keys as noise_keys makes them",
        )
    _check_option("temperature", temperature, len(logits), math.inf)
    _check_option("top_k", top_k, len(logits), math.inf)
    _check_option("top_p", top_p, len(logits), math.inf)
    _check_option("min_p", min_p, len(logits), 1)
    vocab_size = logits.shape[1]
    heat = _column(temperature, logits, torch.float32)
    filtered = top_k is not None or top_p is not None or min_p is not None
    counts = _column(top_k or 0 if isinstance(top_k, int | None) else top_k, logits, torch.int32)
    counts = torch.where(counts == 0, vocab_size, counts).clamp(max=vocab_size)
    shares = _column(1.0 if top_p is None else top_p, logits, torch.float32)
    cuts = _column(0.0 if min_p is None else min_p, logits, torch.float32).double().log().float()
    if backend_of("sample", logits.device, backend, dtype=logits.dtype) == "triton":
        return _sample_op(logits, heat, counts, shares, cuts, keys, filtered)
    logits = logits.float()
    drawing = heat != 0
    scaled = logits / torch.where(drawing, heat, 1.0)[:, None]
    if filtered:
        scaled = _filtered(scaled, counts, shares, cuts)
    tokens = torch.arange(vocab_size, device=logits.device)
    return torch.where(drawing, (scaled + gumbel(keys, token_hashes(tokens))).argmax(-1), logits.argmax(-1))


def _check_option(name: str, values: Tensor | Sequence[float] | float | None, num_entries: int, highest: float) -> None:
    if values is None or isinstance(values, Tensor):
        return
    values = [values] if isinstance(values, int | float) else values
    if len(values) not in (1, num_entries):
        raise SpecError(
            f"{name} has {len(values)} numbers for {num_entries} entries",
            fix=f"give one number, or {num_entries}: one for each row of logits",
        )
    if not all(0 <= value <= highest for value in values):
        raise SpecError(
            f"{name} is {list(values)}: each number lies in 0 ... {highest}",
            fix=f"give {name} from 0 {'up' if highest == math.inf else f'to {highest}'}, 0 where it shall not cut",
        )


def filter_logits(
    logits: Tensor,
    temperatures: Sequence[float],
    min_ps: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
) -> Tensor:
    """Logits [E, V] / temperature, -inf where min-p, top-k (0: all) or top-p drop the token. No temperature is 0."""
    if any(one != 1 for one in temperatures):
        logits = logits / _numbers(temperatures, logits)
    if any(one > 0 for one in min_ps):
        cuts = _numbers([math.log(one) if one > 0 else -math.inf for one in min_ps], logits)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + cuts, -math.inf)
    vocab_size = logits.shape[-1]
    counts = [min(one or vocab_size, vocab_size) for one in top_ks]
    if any(one < 1 for one in top_ps):
        return _top_p(logits, _numbers(counts, logits), _numbers(top_ps, logits))
    if min(counts) < vocab_size:
        best = logits.topk(max(count for count in counts if count < vocab_size)).values
        places = torch.tensor([min(count, best.shape[-1]) - 1 for count in counts], device=logits.device)
        floor = best.gather(-1, places[:, None])
        floor = floor.masked_fill(_numbers(counts, logits) >= vocab_size, -math.inf)
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def _top_p(logits: Tensor, counts: Tensor, shares: Tensor) -> Tensor:
    """-inf where a value is not among the counts [E, 1] best or lies beyond shares [E, 1] of their mass."""
    ordered = logits.sort(-1, descending=True).values
    places = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(places >= counts, -math.inf)
    mass = ordered.softmax(-1)
    # A row without top-p must not lose its rarest tokens to rounding because a row beside it has one.
    kept = mass.cumsum(-1) - mass < shares.masked_fill(shares >= 1, 2.0)
    last = (kept & (ordered > -math.inf)).sum(-1, keepdim=True).clamp(min=1) - 1
    return logits.masked_fill(logits < ordered.gather(-1, last), -math.inf)


def _filtered(scaled: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor) -> Tensor:
    """`filter_logits` after the temperature, with options that lie on the device."""
    scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + cuts[:, None], -math.inf)
    return _top_p(scaled, counts[:, None], shares[:, None])


def _numbers(values: Sequence[float], logits: Tensor) -> Tensor:
    return torch.tensor(values, device=logits.device)[:, None]


def _column(values: Tensor | Sequence[float] | float, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """One number or one an entry as [E] on the logits' device; nothing waits for the device."""
    if not isinstance(values, int | float):
        return torch.as_tensor(values, dtype=dtype, device=logits.device).expand(len(logits)).contiguous()
    return torch.full((len(logits),), values, dtype=dtype, device=logits.device)


# Noise.


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
    """int64 hashes of tokens int64 [...]: what `gumbel` mixes with an entry's key."""
    return _mixed(tokens)


def noise_keys(
    seeds: Sequence[int] | Tensor,
    positions: Sequence[int] | Tensor,
    streams: Sequence[int] | int = GUMBEL,
    device: torch.device | str | None = None,
) -> Tensor:
    """int64 [E]: one key for each (seed, position, stream), on `device`.

    Python seeds may be any integers (64 bits count); tensors are int64 and stay on their device, so that a captured
    graph can make its own keys.
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
    """SplitMix64 of int64 numbers taken as 64 bits; `_mix` on a device."""
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


# What the GPU runs: launches of hone.ops.sample.triton_kernels as one torch op.


FLOOR_SHAPE = (8192, 32, 1)
"""(values at a time, warps, blocks under way) of the kernel that finds a row's threshold."""


@torch.library.custom_op("hone::sample", mutates_args=())
def _sample_op(
    logits: Tensor, heat: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor, keys: Tensor, filtered: bool
) -> Tensor:
    from hone.ops.sample import triton_kernels as kernels

    logits, keys = logits if logits.stride(-1) == 1 else logits.contiguous(), keys.contiguous()
    num_rows, vocab_size = logits.shape
    block = min(4096, 1 << (vocab_size - 1).bit_length())
    parts = -(-vocab_size // block)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(num_rows, parts, dtype=torch.float64, device=logits.device)
    token = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    floor = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return out
    stride = logits.stride(0)
    if filtered:
        wide, warps, stages = FLOOR_SHAPE
        wide = max(16, min(wide, 1 << (vocab_size - 1).bit_length()))
        kernels.floors[(num_rows,)](
            logits, heat, counts, shares, cuts, floor, stride, vocab_size, BLOCK=wide, STAGES=stages, num_warps=warps
        )
    kernels.draw_parts[(num_rows, parts)](
        logits, heat, floor, keys, best, token, stride, vocab_size, FILTERED=filtered, BLOCK=block, num_warps=8
    )
    kernels.best_of_parts[(num_rows,)](best, token, out, parts, BLOCK=1 << (parts - 1).bit_length(), num_warps=1)
    return out


@_sample_op.register_fake
def _sample_fake(
    logits: Tensor, heat: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor, keys: Tensor, filtered: bool
) -> Tensor:
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
