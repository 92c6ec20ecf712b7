"""The lengths of DoRA's rows: outputs stretched in place, and their gradient with the sums that the lengths' own is made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 256
"""Tokens and outputs of a program."""


@triton.jit
def stretch(out, stretched, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [T, N] becomes out * stretched, ROWS x COLUMNS a program."""
    row = tl.program_id(1).to(tl.int64) * ROWS
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    factor = tl.load(stretched + at, mask=inside, other=0.0)
    for step in range(ROWS):
        kept = inside & (row + step < num_rows)
        here = out + (row + step) * width + at
        found = tl.load(here, mask=kept, other=0.0).to(tl.float32) * factor
        tl.store(here, found.to(out.dtype.element_ty), mask=kept)


@triton.jit
def stretch_backward(
    upstream, out, stretched, flow, sums, num_rows, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """flow = upstream * stretched; sums [T / ROWS, N] = the sums over ROWS tokens of upstream * out."""
    row = tl.program_id(1).to(tl.int64) * ROWS
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    factor = tl.load(stretched + at, mask=inside, other=0.0)
    total = tl.zeros([COLUMNS], tl.float32)
    for step in range(ROWS):
        kept = inside & (row + step < num_rows)
        grad = tl.load(upstream + (row + step) * stride + at, mask=kept, other=0.0).to(tl.float32)
        made = tl.load(out + (row + step) * width + at, mask=kept, other=0.0).to(tl.float32)
        total += grad * made
        tl.store(flow + (row + step) * width + at, (grad * factor).to(flow.dtype.element_ty), mask=kept)
    tl.store(sums + tl.program_id(1) * width + at, total, mask=inside)


def launch_stretch(out: Tensor, stretched: Tensor) -> None:
    """out contiguous [T, N] becomes out * stretched; `stretched` is float32 [N]."""
    if out.numel():
        grid = (triton.cdiv(out.shape[1], COLUMNS), triton.cdiv(len(out), ROWS))
        stretch[grid](out, stretched, *out.shape, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=1)


def launch_stretch_backward(upstream: Tensor, out: Tensor, stretched: Tensor) -> tuple[Tensor, Tensor]:
    """(upstream * stretched [T, N], the sums over T of upstream * out float32 [N]) of contiguous `out`."""
    upstream = upstream if upstream.stride(-1) == 1 else upstream.contiguous()
    flow = torch.empty(out.shape, dtype=upstream.dtype, device=out.device)
    parts = triton.cdiv(len(out), ROWS)
    sums = torch.empty(parts, out.shape[1], dtype=torch.float32, device=out.device)
    if out.numel():
        stretch_backward[(triton.cdiv(out.shape[1], COLUMNS), parts)](
            upstream,
            out,
            stretched,
            flow,
            sums,
            *out.shape,
            upstream.stride(0),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=1,
        )
    return flow, sums.sum(0)
