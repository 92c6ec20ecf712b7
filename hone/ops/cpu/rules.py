"""When operations take the compiled kernels of a CPU: the rules of `hone.ops.dispatch` for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hone.ops.where import Choice, Where

HALVES = (torch.bfloat16, torch.float16)
UP_TO_32 = (torch.bfloat16, torch.float16, torch.float32)
GATHERED = Choice("reference", "no GPU: sequences of similar length gathered into few calls of torch")

FEW_ROWS = 32
"""Rows up to which a product on a CPU takes as long as reading its weight, about."""


def cpu_step(isa: str, dtype: torch.dtype) -> int:
    """Columns that a product on this CPU takes at once: pairs of bf16 where there are instructions for them, else floats."""
    return 32 if isa == "avx512_bf16" and dtype == torch.bfloat16 else 16


def _cpu_linear(
    where: Where,
    *,
    dtype: torch.dtype | None,
    rows: int,
    out_features: int,
    in_features: int,
    in_rows: bool,
    plain: bool,
    large: bool = False,
) -> Choice:
    """`large`: the call's own cost does not count, since the product is part of a program."""
    if dtype not in UP_TO_32 or not plain or not in_rows:
        return Choice(
            "reference", "the compiled kernel takes one dtype of 16 or 32 bits, rows, no gradient and no autocast"
        )
    if in_features % cpu_step(where.cpu, dtype):
        return Choice("reference", f"{in_features} columns are no multiple of {cpu_step(where.cpu, dtype)}")
    if rows > FEW_ROWS or (out_features * in_features < 1 << 16 and not large):
        return Choice("reference", f"{rows} rows of {out_features} x {in_features}: torch's product")
    return Choice("compiled", f"{rows} rows: bound by reading the weight")


def _cpu_quantized_linear(
    where: Where,
    *,
    dtype: torch.dtype,
    rows: int,
    bits: int,
    group_size: int,
    in_features: int,
    tiled: bool,
    plain: bool,
) -> Choice:
    if dtype not in UP_TO_32 or not plain or tiled:
        return Choice(
            "reference", f"the compiled kernel takes plain codes, x of 16 or 32 bits and no gradient, not {dtype}"
        )
    if rows > FEW_ROWS:
        return Choice("reference", f"{rows} rows: weights are unpacked and multiplied by torch")
    if bits not in (4, 8) or (group_size != in_features and group_size % 32) or in_features % 16:
        return Choice(
            "reference",
            f"{in_features} codes of {bits} bits in groups of {group_size}: the compiled kernel takes multiples of 16 and 32",
        )
    return Choice("compiled", f"{rows} rows: products of codes, x in 16 bits")


def _cpu_attend_paged(
    where: Where,
    *,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    rows: int,
    softcap: bool = False,
    decode: bool = False,
) -> Choice:
    """`decode`: one new token a sequence, and no scales, sinks or kept first tokens."""
    if softcap or not decode:
        return GATHERED
    if dtype not in UP_TO_32 or page_dtype != dtype:
        return Choice(
            "reference",
            f"the compiled kernel takes queries and pages of one dtype up to 32 bits, not {dtype}, {page_dtype}",
        )
    if head_dim != v_dim or head_dim % 32 or head_dim > 512:
        return Choice(
            "reference", f"the compiled kernel's heads are multiples of 32 up to 512, not {head_dim} and {v_dim}"
        )
    return Choice("compiled", "pages are read in place")


ON_CPU: dict[str, Callable[..., Choice]] = {
    "linear": _cpu_linear,
    "quantized_linear": _cpu_quantized_linear,
    "attend_paged": _cpu_attend_paged,
}
"""Rules for a CPU with vector instructions that there are compiled kernels for."""
