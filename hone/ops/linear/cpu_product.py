"""One product of few rows on a CPU, as a program of its own: the twin of `linear` and `quantized_linear`.

Legend: M rows of x, N output features, K input features.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.ops.cpu.program import Program
from hone.ops.linear.cpu_weights import ROWS, CpuWeight

_MOST_KEPT = 256
_kept = threading.local()
"""Programs of this thread by what they depend on: a program's buffers serve one call at a time."""


class _Product:
    """A product of up to `rows` rows with any weight like `weight`, which it does not hold."""

    def __init__(self, dtype: torch.dtype, rows: int, weight: CpuWeight) -> None:
        program = self.program = Program(dtype, rows)
        self.out = program.floats(weight.out_features)
        operand = program.operand(weight.columns)
        self.first = program.load_operand(torch.empty(1, weight.in_features, dtype=dtype), operand)
        self.second = program.product(operand, weight, self.out, hold=False)


def product(x: Tensor, weight: CpuWeight) -> Tensor:
    """x [..., K] times `weight` transposed, plus its bias: [..., N] in x's dtype. K is a multiple of 16."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if not len(rows):
        return x.new_empty(*x.shape[:-1], weight.out_features)
    made = _product_of(x.dtype, len(rows), weight)
    made.program.point(made.first, rows)
    made.program.point_weight(made.second, weight)
    made.program.run(len(rows))
    return made.out[: len(rows)].to(x.dtype, copy=True).view(*x.shape[:-1], weight.out_features)


def _product_of(dtype: torch.dtype, rows: int, weight: CpuWeight) -> _Product:
    programs: dict[Any, _Product] = _kept.__dict__.setdefault("programs", {})
    most = 1 << (rows - 1).bit_length()
    key = (dtype, most, weight.stored, weight.data.shape, weight.out_features, weight.in_features, weight.group_size)
    found = programs.get(key)
    if found is None:
        if len(programs) >= _MOST_KEPT:
            programs.clear()
        found = programs[key] = _Product(dtype, most, weight)
    return found


def unpacked(weight: CpuWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """Rows of a weight in 4-bit blocks as [n, K] in `dtype`, times their scales (not `row_scales`), from a multiple of 4.

    A compiled kernel does it. The result is valid until this thread's next call: mapping new memory would take longer than the kernel.
    """
    scales = None if weight.scales is None else weight.scales[rows]
    start, stop, _ = rows.indices(weight.out_features)
    blocks = weight.data[start // ROWS : -(-stop // ROWS)]
    part = replace(weight, data=blocks, scales=scales, out_features=stop - start)
    buffers: dict[torch.dtype, Tensor] = _kept.__dict__.setdefault("buffers", {})
    values = part.out_features * weight.in_features
    if dtype not in buffers or len(buffers[dtype]) < values:
        buffers[dtype] = torch.empty(values, dtype=dtype)
    out = buffers[dtype][:values].view(part.out_features, weight.in_features)
    program = Program(dtype, 1)
    program.unpack(part, out, weight.in_features)
    program.run(1)
    return out
