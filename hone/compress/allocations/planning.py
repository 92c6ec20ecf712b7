"""Plans of allocated compressions: the quantizers to plan with, and the budget.

`before` are the tensors of the model that is compressed by name, `targets` its linears to compress by layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hone.compress.allocations.base import Allocation, Budget, Candidates, candidates
from hone.compress.quantizers.base import quantizer_of
from hone.compress.sizes import Entry, matrix_bytes, shard_sizes
from hone.compress.step import Assigned, Step
from hone.compress.targets import HEAD, Linear, matrix_name


def assigned(
    allocation: Allocation | None,
    storage: Step | None,
    before: dict[str, Entry],
    targets: tuple[tuple[Linear, ...], ...],
    rest_dtype: torch.dtype | None,
    dtype: torch.dtype,
    where: str,
    embedding: Linear | None = None,
) -> tuple[Assigned, Budget | None]:
    """The quantizers to plan with, and the budget of an allocation: then those with the most bits for all that fit it, and with more for
    as many of the first matrices as use it up.

    Head and `embedding` keep the quantizer's own bits, outside the budget's choice.
    """
    if allocation is None:
        return Assigned(storage), None
    quantizer = quantizer_of(() if storage is None else (storage,))
    options = candidates(quantizer, allocation.bits)
    matrices = tuple(
        Candidates(
            matrix_name(index, one.path),
            tuple(matrix_bytes(option, one, dtype) for option in options.values()),
            one.rows * one.columns,
        )
        for index, linears in enumerate(targets)
        for one in linears
        if one.path != HEAD
    )
    fewest = Assigned(quantizer, dict.fromkeys((one.name for one in matrices), min(options)))
    lowest = shard_sizes(before, targets, fewest, rest_dtype, dtype, embedding)
    weights = sum(one.weights for one in matrices)
    budget = allocation.budget(matrices, weights, sum(lowest), where)
    totals = [sum(one.sizes[place] for one in matrices) for place in range(len(options))]
    base = max(place for place, total in enumerate(totals) if total <= budget.most)
    widths, left = list(options), budget.most - totals[base]
    bits = dict.fromkeys(fewest.bits, widths[base])
    for one in matrices if base + 1 < len(widths) else ():
        more = one.sizes[base + 1] - one.sizes[base]
        if more <= left:
            bits[one.name], left = widths[base + 1], left - more
    return replace(fewest, bits=bits), budget
