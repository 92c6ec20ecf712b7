"""Sampling from logits: filters, and noise that depends on (seed, position, token) alone, never on the batch.

A draw is Gumbel-max: argmax of logits + noise, with the noise of each (seed, position, token) a hash of the three. So a
seeded request gives the same text in any batch, and no softmax is needed. Legend: E entries (one per token to draw),
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.linear.shapes import power_of_2
from hone.ops.sample import reference
from hone.ops.sample.noise import noise_keys


def sample(
    logits: Tensor,
    temperature: Tensor | Sequence[float] | float,
    top_k: Tensor | Sequence[int] | int | None = None,
    top_p: Tensor | Sequence[float] | float | None = None,
    min_p: Tensor | Sequence[float] | float | None = None,
    *,
    keys: Tensor | tuple[Tensor, Tensor],
    peaks: bool = False,
    several: int = 1,
    backend: str | None = None,
) -> Any:
    """Tokens int64 [E] drawn from logits [E, V] in float32, bfloat16 or float16.

    Each option is one number or one per entry: `temperature` 0 takes the most likely token. Of the tokens after division
    by the temperature `min_p` keeps those with at least that fraction of the largest probability, then `top_k` that many,
    then `top_p` the most likely ones up to that mass (None, or top_k 0 or V, top_p 1, min_p 0: all). `keys` int64 [E] are
    from `noise_keys`, or are (seeds, positions) int64 [E] each, whose keys the kernel computes: entry e's noise depends on
    keys[e] and the token alone. Of equal scores the first token is taken. With `peaks` the result is (tokens, the largest
    logit of each entry, float32 [E]: NaN where one is NaN).

    With `several` more than 1 the tokens are int64 [E, several], the first as without it: as many draws without replacement (Kool et al.
    2019, arXiv:1903.06059), or at temperature 0 the most likely tokens. Where filters leave fewer, the last are any tokens.

    Options in tensors (float32, top_k int32, on the logits' device) are read where they are: no copy, nothing that waits,
    so that a captured graph draws with what they hold at its replay. Raises SpecError naming the argument that does not
    fit; options in tensors are not checked, because reading them would make the host wait for a GPU.
    """
    _check_draw(logits, keys)
    if not 1 <= several <= min(16, logits.shape[1]):
        raise SpecError(
            f"several is {several}, of {logits.shape[1]} tokens", fix="draw 1 to 16 tokens, and no more than there are"
        )
    _check_option("temperature", temperature, len(logits), math.inf)
    _check_option("top_k", top_k, len(logits), math.inf)
    _check_option("top_p", top_p, len(logits), math.inf)
    _check_option("min_p", min_p, len(logits), 1)
    temps = _column(temperature, logits, torch.float32)
    counts = None if top_k is None else _column(top_k, logits, torch.int32)
    shares = None if top_p is None else _column(top_p, logits, torch.float32)
    least = None if min_p is None else _column(min_p, logits, torch.float32)
    seeds, positions = keys if isinstance(keys, tuple) else (keys, None)
    if backend_of("sample", logits.device, backend, dtype=logits.dtype) == "triton":
        run = _sample_op if torch.compiler.is_compiling() else _sample
        drawn = run(logits, temps, counts, shares, least, seeds, positions, several)
    else:
        noise = seeds if positions is None else noise_keys(seeds, positions)
        drawn = reference.sample(logits, temps, counts, shares, least, noise, several)
    return drawn if peaks else drawn[0]


def _check_draw(logits: Tensor, keys: Tensor | tuple[Tensor, Tensor]) -> None:
    each = keys if isinstance(keys, tuple) else (keys,)
    shapes = " and ".join(str(tuple(one.shape)) for one in each)
    if logits.dim() != 2 or any(one.shape != logits.shape[:1] for one in each) or not logits.shape[1]:
        raise SpecError(
            f"logits {tuple(logits.shape)} and keys {shapes} must be [E, V] and [E]",
            fix="give one row of at least one logit, and one key of noise_keys, for each token to draw",
        )
    if not logits.is_floating_point() or any(one.dtype != torch.int64 for one in each):
        raise SpecError(
            f"logits are {logits.dtype} and keys {' and '.join(str(one.dtype) for one in each)}, not floating and int64",
            fix="give the model's logits, and the keys of noise_keys",
        )


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
            f"{name} is {list(values)}: each number must be in 0 ... {highest}",
            fix=f"give {name} from 0 {'up' if highest == math.inf else f'to {highest}'}",
        )


def _column(values: Tensor | Sequence[float] | float, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """One number, or one per entry, as [E] on the logits' device; the host does not wait for the device."""
    if not isinstance(values, int | float):
        return torch.as_tensor(values, dtype=dtype, device=logits.device).expand(len(logits)).contiguous()
    return torch.full((len(logits),), values, dtype=dtype, device=logits.device)


# The GPU path: hone.ops.sample.triton_kernels, and the same as one torch op for compiled graphs.


class DrawShape(NamedTuple):
    """Values of a block, warps and programs of a row."""

    block: int
    warps: int
    parts: int


def draw_shape(vocab_size: int) -> DrawShape:
    """Every block has its own program."""
    block = max(16, min(2048, power_of_2(vocab_size)))
    return DrawShape(block, 8, -(-vocab_size // block))


def floor_shape(vocab_size: int) -> DrawShape:
    """One program searches a row's threshold: a wide one."""
    return DrawShape(max(16, min(8192, power_of_2(vocab_size))), 32, 1)


def _sample(
    logits: Tensor,
    temps: Tensor,
    counts: Tensor | None,
    shares: Tensor | None,
    least: Tensor | None,
    seeds: Tensor,
    positions: Tensor | None,
    several: int,
) -> tuple[Tensor, Tensor]:
    from hone.ops.sample import triton_kernels as kernels

    logits, seeds = logits if logits.stride(-1) == 1 else logits.contiguous(), seeds.contiguous()
    num_rows, vocab_size = logits.shape
    out, peak = _sample_fake(logits, temps, counts, shares, least, seeds, positions, several)
    if not num_rows:
        return out, peak
    filtered = counts is not None or shares is not None or least is not None
    shape = draw_shape(vocab_size)
    # Not two rows of one tensor: where the second begins would decide which variant is compiled.
    scores, peaks = (peak.new_empty(num_rows, shape.parts, each) for each in (several, 1))
    token = torch.empty(num_rows, shape.parts, several, dtype=torch.int32, device=logits.device)
    floors = temps
    if filtered:
        wide, floors = floor_shape(vocab_size), torch.empty_like(peak)
        kernels.floors[(num_rows,)](
            logits, temps, temps if counts is None else counts, temps if shares is None else shares,
            temps if least is None else least, floors, logits.stride(0), vocab_size, TOP_K=counts is not None,
            TOP_P=shares is not None, MIN_P=least is not None, BLOCK=wide.block, STAGES=1, num_warps=wide.warps,
        )  # fmt: skip
    kernels.draw[(num_rows, shape.parts)](
        logits, temps, floors, seeds, seeds if positions is None else positions.contiguous(), scores, token, peaks,
        logits.stride(0), vocab_size, shape.block, FILTERED=filtered, SEEDED=positions is not None, S=shape.parts,
        SEVERAL=several, BLOCK=shape.block, num_warps=shape.warps,
    )  # fmt: skip
    kernels.best_of_parts[(num_rows,)](
        scores, token, peaks, out, peak, S=shape.parts, SEVERAL=several,
        BLOCK=power_of_2(shape.parts * several), num_warps=1 if several == 1 else 4,
    )  # fmt: skip
    return out, peak


_sample_op = torch.library.custom_op("hone::sample", _sample, mutates_args=())


@_sample_op.register_fake
def _sample_fake(
    logits: Tensor,
    temps: Tensor,
    counts: Tensor | None,
    shares: Tensor | None,
    least: Tensor | None,
    seeds: Tensor,
    positions: Tensor | None,
    several: int,
) -> tuple[Tensor, Tensor]:
    shape = (len(logits),) if several == 1 else (len(logits), several)
    out = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return out, torch.empty(len(logits), dtype=torch.float32, device=logits.device)
