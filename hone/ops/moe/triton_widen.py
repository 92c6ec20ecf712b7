"""Codes of experts as dense weights, for products of so many rows that widening them once for all rows is little beside the product.

Legend: E experts, N output features, K input features, G groups of columns that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.linear.shapes import power_of_2
from hone.ops.moe.triton_experts import scale_of
from hone.ops.moe.triton_visits import numbers_of
from hone.ops.moe.weights import ExpertWeights

_ROWS, _VALUES = 32, 4096
"""Rows and weights of a program: scales of neighbouring rows lie side by side, so that few rows would read most of them in vain."""


@triton.jit
def widen_rows(
    codes, scales, out, num_rows, num_out, num_in, groups,
    KIND: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out [E N, K]: codes (int4 and mxfp4: K / 2 bytes a row) times scales [E, G, N], rounded once; UNITS blocks of ROWS rows a program."""
    STORED: tl.constexpr = BLOCK // 2 if KIND == "int4" or KIND == "mxfp4" else BLOCK
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    blocks = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    units = num_in // BLOCK
    own = (rows < num_rows)[:, None] & (blocks < units)[None, :]
    group = blocks * BLOCK // (num_in // groups)
    factors = (rows // num_out * groups)[:, None] * num_out + group[None, :] * num_out + (rows % num_out)[:, None]
    scale = scale_of(tl.load(scales + factors, mask=own, other=0), KIND)[:, :, None]
    at = tl.arange(0, STORED)[None, None, :]
    stored = codes + (rows[:, None] * units + blocks[None, :])[:, :, None] * STORED + at
    found = tl.load(stored, mask=own[:, :, None], other=0.0)
    places = out + (rows[:, None] * units + blocks[None, :])[:, :, None] * BLOCK + at
    tl.store(places, (numbers_of(found, KIND, False) * scale).to(out.dtype.element_ty), mask=own[:, :, None])
    if KIND == "int4" or KIND == "mxfp4":
        high = (numbers_of(found, KIND, True) * scale).to(out.dtype.element_ty)
        tl.store(places + STORED, high, mask=own[:, :, None])


def widened(weights: ExpertWeights, dtype: torch.dtype) -> Tensor:
    """[E, N, K] in `dtype`: `ExpertWeights.dequantize` of contiguous codes, in one pass over memory."""
    experts, num_out, num_in = weights.sizes
    assert weights.scales is not None, "dense weights are wide"
    out = torch.empty(experts, num_out, num_in, dtype=dtype, device=weights.values.device)
    block, num_rows = weights.block, experts * num_out
    units = min(power_of_2(num_in // block), max(1, _VALUES // (_ROWS * block)))
    widen_rows[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_in // block, units))](
        weights.values, weights.scales, out, num_rows, num_out, num_in, weights.scales.shape[1],
        KIND=weights.kind, BLOCK=block, UNITS=units, ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return out
