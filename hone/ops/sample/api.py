"""Sampling from logits: filters, and noise that depends on (seed, position, token) alone, never on the batch.

A draw is Gumbel-max: argmax of logits + noise, with the noise of each (seed, position, token) a hash of the three. So a
seeded request gives the same text in any batch, and no softmax is needed. Legend: E entries (one per token to draw),
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.sample import reference


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
    """Tokens int64 [E] drawn from logits [E, V] in float32, bfloat16 or float16.

    Each option is one number or one per entry: `temperature` 0 takes the most likely token. Of the tokens after division
    by the temperature `min_p` keeps those with at least that fraction of the largest probability, then `top_k` that many,
    then `top_p` the most likely ones up to that mass (None, or top_k 0 or V, top_p 1, min_p 0: all). `keys` int64 [E] are
    from `noise_keys`: entry e's noise depends on keys[e] and the token alone. Of equal scores the first token is taken.
    Raises SpecError naming the argument that does not fit; options in tensors are not checked, because reading them would
    make the host wait for a GPU.
    """
    if logits.dim() != 2 or keys.shape != logits.shape[:1] or not logits.shape[1]:
        raise SpecError(
            f"logits {tuple(logits.shape)} and keys {tuple(keys.shape)} must be [E, V] and [E]",
            fix="give one row of at least one logit, and one key of noise_keys, for each token to draw",
        )
    if not logits.is_floating_point() or keys.dtype != torch.int64:
        raise SpecError(
            f"logits are {logits.dtype} and keys {keys.dtype}, not floating and int64",
            fix="give the model's logits, and the keys of noise_keys",
        )
    _check_option("temperature", temperature, len(logits), math.inf)
    _check_option("top_k", top_k, len(logits), math.inf)
    _check_option("top_p", top_p, len(logits), math.inf)
    _check_option("min_p", min_p, len(logits), 1)
    vocab_size = logits.shape[1]
    temps = _column(temperature, logits, torch.float32)
    filtered = top_k is not None or top_p is not None or min_p is not None
    counts = _column(top_k or 0 if isinstance(top_k, int | None) else top_k, logits, torch.int32)
    counts = torch.where(counts == 0, vocab_size, counts).clamp(max=vocab_size)
    shares = _column(1.0 if top_p is None else top_p, logits, torch.float32)
    cuts = _column(0.0 if min_p is None else min_p, logits, torch.float32).double().log().float()
    if backend_of("sample", logits.device, backend, dtype=logits.dtype) == "triton":
        return _sample_op(logits, temps, counts, shares, cuts, keys, filtered)
    return reference.sample(logits, temps, counts, shares, cuts, keys, filtered)


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


# The GPU path: hone.ops.sample.triton_kernels as one torch op.


FLOOR_SHAPE = (8192, 32, 1)
"""(values per block, warps, blocks in flight) of the kernel that finds a row's threshold."""


@torch.library.custom_op("hone::sample", mutates_args=())
def _sample_op(
    logits: Tensor, temps: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor, keys: Tensor, filtered: bool
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
            logits, temps, counts, shares, cuts, floor, stride, vocab_size, BLOCK=wide, STAGES=stages, num_warps=warps
        )
    kernels.draw_parts[(num_rows, parts)](
        logits, temps, floor, keys, best, token, stride, vocab_size, FILTERED=filtered, BLOCK=block, num_warps=8
    )
    kernels.best_of_parts[(num_rows,)](best, token, out, parts, BLOCK=1 << (parts - 1).bit_length(), num_warps=1)
    return out


@_sample_op.register_fake
def _sample_fake(
    logits: Tensor, temps: Tensor, counts: Tensor, shares: Tensor, cuts: Tensor, keys: Tensor, filtered: bool
) -> Tensor:
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)
