"""Which backend multiplies the tokens of experts on a GPU with Triton: the rules of `hone.ops.dispatch` for this room."""

from __future__ import annotations

import torch

from hone.ops.cpu.rules import HALVES
from hone.ops.where import Choice, Where

WIDENED_FROM = 80
"""Visits an expert from which codes are widened once before the product: before, each tile of rows widens them for itself."""

WIDENED_BYTES = 256 << 20
"""Most bytes of codes that are widened at a time, but for one expert."""


def grouped_linear(
    where: Where, *, dtype: torch.dtype, num_rows: int, num_experts: int, sizes: tuple[int, int], grad: bool
) -> Choice:
    if dtype not in HALVES:
        return Choice("reference", f"grouped products take dtypes of 16 bits, not {dtype}")
    if not grad and num_rows <= 32 * num_experts:
        return Choice("triton", "few tokens per expert: bound by reading the weights once")
    if any(size % 8 for size in sizes):
        return Choice("reference", f"grouped products need sizes that are multiples of 8, not {sizes}")
    if where.runs_gluon:
        return Choice("gluon", "many tokens per expert, or a gradient: Hopper's asynchronous products, without padding")
    return Choice("torch", "many tokens per expert, or a gradient, on another GPU than Hopper: torch's grouped product")


def choose_experts(where: Where, *, dtype: torch.dtype | None, num_experts: int, top_k: int) -> Choice:
    """`dtype` None: x and the router's weight differ."""
    if dtype not in HALVES:
        return Choice("reference", f"the kernels take a router of 16 bits and x of the same, not {dtype}")
    if num_experts > 1024 or top_k > 32:
        return Choice("reference", f"the kernels take up to 32 of 1024 experts, not {top_k} of {num_experts}")
    return Choice("triton", "two kernels: logits summed in float32, and the best of them")


def expert_swiglu(
    where: Where,
    *,
    dtype: torch.dtype | None,
    visits: int,
    num_experts: int,
    sizes: tuple[int, int],
    kind: str,
    plain: bool,
) -> Choice:
    """`dtype` None: x and dense weights differ. `kind` of both weights, "mixed" where they differ; `plain`: no gradient."""
    dense = kind == "dense"
    if dense and (not plain or visits > 48 * num_experts):
        return Choice("grouped", "many tokens per expert, or a gradient: sorted by expert, for grouped products")
    if not plain:
        return Choice("reference", "codes have no kernel with a gradient")
    if dtype not in HALVES:
        return Choice("grouped" if dense else "reference", f"the kernels take 16 bits, not {dtype}")
    if num_experts > 1024 or any(size % 16 for size in sizes):
        said = f"the kernels take up to 1024 experts and sizes in sixteens, not {num_experts} of {sizes}"
        return Choice("grouped" if dense else "reference", said)
    if not dense and where.runs_gluon and visits > WIDENED_FROM * num_experts:
        return Choice("grouped", "many tokens per expert: codes are widened once for all, for grouped products")
    if kind == "mixed":
        return Choice("triton", "codes of two kinds, widened in registers")
    return Choice("triton", "x is read where it is, and each expert's weights once")
