"""Launches of the kernels of `triton_experts`: tiles from the problem's sizes alone, buffers and grids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.ops.early import early_launch, launch_options
from hone.ops.linear.codes import input_codes
from hone.ops.linear.shapes import power_of_2
from hone.ops.moe import triton_experts as kernels
from hone.ops.moe import triton_visits as alone
from hone.ops.moe.weights import ExpertWeights, Rounding

SEARCHED = 512
"""Up to this many visits every program looks for those of its expert itself; more are listed by expert first."""

ALONE = {True: 4, False: 16}
"""Up to this many tokens, with dense weights or codes, each visit is computed by itself: its expert is hardly another's, too, and
tensor cores wait longer for codes to be widened in their order than products of them take."""

ALONE_ROWS, ALONE_VALUES = 4, 8192
"""Of such a program: output features, and weights that it loads at once."""

_PROGRAMS = 264
"""Programs that fill a GPU: twice an H100's multiprocessors."""


class ExpertShape(NamedTuple):
    """Tile and pipeline of a product of experts: output features and tokens of a tile, columns and stages of its sum, warps."""

    block_n: int
    tokens: int
    block_k: int
    stages: int
    warps: int


def expert_shape(visits: int, experts: int, features: int, columns: int, block: int, rows_each: int) -> ExpertShape:
    """For `visits` of `experts` experts of `features` output features, of which a tile has `rows_each` for each; `block`: columns
    that share a scale, 0 for dense weights."""
    mean = visits / experts
    tokens = 16 if mean <= 9 else 32 if mean <= 20 else 64
    visited = experts * (1.0 - (1.0 - 1.0 / experts) ** visits)
    wide = not block and tokens == 64 and rows_each == 1
    block_n = 128 if wide else 64
    while block_n > 16 and visited * -(-features // block_n) < _PROGRAMS:
        block_n //= 2
    block_n = min(block_n, max(16, power_of_2(features)))
    # Dense weights of several tokens take less of a stage each, so that more stages are under way.
    block_k = block or min(128 if tokens == 16 else 64, max(16, power_of_2(columns)))
    stage = 2 * rows_each * block_n * block_k + 2 * tokens * block_k
    stages = max(2, min(6 if block_n < 64 else 4, (110 << 10) // stage))
    return ExpertShape(block_n, tokens, block_k, stages, 8 if block_n == 128 else 4)


def _weights(weights: ExpertWeights, block_k: int) -> dict[str, Any]:
    """The constants of a kernel that say how weights are stored."""
    columns, groups = weights.sizes[2], 1 if weights.scales is None else weights.scales.shape[1]
    even = columns % block_k == 0
    grouped, biased = weights.scales is not None and groups > 1, weights.bias is not None
    return {"KIND": weights.kind, "BLOCK": block_k, "EVEN": even, "GROUPED": grouped, "BIASED": biased}


def launch_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeights, down: ExpertWeights, listed: tuple[Tensor, Tensor] | None,
    local_share: float, limit: float | None, alpha: float, rounding: Rounding | None = None,
) -> Tensor:  # fmt: skip
    """[T, D] of x [T, D] with contiguous rows, ids integer and weights float32 [T, k], both contiguous.

    `listed`: (order, ends) of the visits, None where there are at most `SEARCHED`. The rest: see `expert_swiglu`. Rounded inputs are
    multiplied as codes in x's dtype, which are exact in it; their scales multiply what the products summed.
    """
    (num_tokens, width), top_k = x.shape, ids.shape[1]
    experts, both, _ = gate_up.sizes
    inner, visits, some = both // 2, num_tokens * top_k, local_share < 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    early = launch_options(early_launch(x.device))
    order, ends = (ids, ids) if listed is None else listed
    by_visit = listed is None and visits < experts
    slots = visits if by_visit else experts
    found = {
        "LISTED": listed is not None,
        "BY_VISIT": by_visit,
        "IDS": max(16, power_of_2(visits)) if listed is None else 16,
        **early,
    }
    h = torch.empty(visits, inner, dtype=x.dtype, device=x.device)
    x, x_scales = (x, weights) if rounding is None else codes_of(x, rounding)
    gate = _gate(limit, alpha) | {"ROUNDED": rounding is not None}
    if num_tokens <= ALONE[gate_up.kind == "dense"]:
        _alone(x, x_scales, ids, weights, gate_up, down, h, out, some, gate, early, rounding)
        return out
    expected = max(1, round(visits * local_share))
    shape = expert_shape(expected, experts, inner, width, gate_up.block, 2)
    kernels.gate_up_swiglu[(slots * -(-inner // shape.block_n),)](
        x, x_scales, *_pointers(gate_up), ids, order, ends, h, x.stride(0), visits, experts, top_k, inner, width, _groups(gate_up),
        **gate, **_weights(gate_up, shape.block_k), TOKENS=shape.tokens, BLOCK_N=shape.block_n, STAGES=shape.stages,
        num_warps=shape.warps, **found,
    )  # fmt: skip
    if rounding is not None:
        h, weights = _rounded_again(h, ids, weights, experts, rounding)
    y = torch.empty(visits, width, dtype=x.dtype, device=x.device)
    shape = expert_shape(expected, experts, width, inner, down.block, 1)
    kernels.down_visits[(slots * -(-width // shape.block_n),)](
        h, *_pointers(down), ids, order, ends, y, visits, experts, width, inner, _groups(down), **_weights(down, shape.block_k),
        TOKENS=shape.tokens, BLOCK_N=shape.block_n, STAGES=shape.stages, num_warps=shape.warps, **found,
    )  # fmt: skip
    columns = min(1024, power_of_2(width))
    kernels.sum_visits[(num_tokens, -(-width // columns))](
        y, ids, weights, out, width, top_k, experts,
        TOP_K=power_of_2(top_k), BLOCK=columns, SOME=some, num_warps=4, **early,
    )  # fmt: skip
    return out


def _alone(
    x: Tensor, x_scales: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertWeights, down: ExpertWeights, h: Tensor, out: Tensor,
    some: bool, gate: dict[str, Any], early: dict[str, Any], rounding: Rounding | None,
) -> None:  # fmt: skip
    """Fills h [P, F] and out [T, D] where every visit is computed by itself (`triton_visits`)."""
    (num_tokens, width), top_k, (visits, inner), experts = x.shape, ids.shape[1], h.shape, len(gate_up.values)
    rows, padded = ALONE_ROWS, power_of_2(top_k)
    alone.gate_up_visits[(visits * -(-inner // rows),)](
        x, x_scales, *_pointers(gate_up), ids, h, x.stride(0), experts, top_k, inner, width, _groups(gate_up), **gate,
        **tile_of(gate_up, rows), BLOCK_N=rows, num_warps=4, **early,
    )  # fmt: skip
    if rounding is not None:
        h, weights = _rounded_again(h, ids, weights, experts, rounding)
    tile = tile_of(down, rows * padded)
    alone.down_tokens[(num_tokens * -(-width // rows),)](
        h, *_pointers(down), ids, weights, out, experts, top_k, width, inner, _groups(down), TOP_K=padded,
        **tile | {"MASKED": some or tile["MASKED"]}, BLOCK_N=rows, num_warps=4, **early,
    )  # fmt: skip


def codes_of(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """(codes [M, K] of x in its own dtype, float32 scales [M])."""
    codes, scales = input_codes(x, rounding)
    return codes.to(x.dtype), scales


def _rounded_again(h: Tensor, ids: Tensor, weights: Tensor, experts: int, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Codes of h [P, F], and the visits' weights [T, k] times their scales; of nobody's visits, of which h is not written, 0."""
    codes, scales = codes_of(h, rounding)
    return codes, torch.where(ids < experts, weights * scales.view_as(weights), 0.0)


def tile_of(weights: ExpertWeights, rows: int) -> dict[str, Any]:
    """The constants of a kernel of `triton_visits` with `rows` rows: how weights are stored, and how much of a row is loaded at once."""
    columns = weights.sizes[2]
    block = weights.block or min(128, columns & -columns)
    units, span = columns // block, 1
    while units % (2 * span) == 0 and 2 * span * block * rows <= ALONE_VALUES:
        span *= 2
    if 4 * span * block * rows < ALONE_VALUES:  # many blocks that no power of 2 divides: the last step reads less
        spans = [1 << power for power in range(max(1, ALONE_VALUES // (block * rows)).bit_length())]
        span = max((one for one in spans if -(-units // one) * one <= 1.125 * units), default=span)
    grouped = weights.scales is not None and weights.scales.shape[1] > 1
    constants = {"KIND": weights.kind, "BLOCK": block, "GROUPED": grouped, "SPAN": span, "STEPS": -(-units // span)}
    return constants | {"MASKED": units % span > 0, "BIASED": weights.bias is not None}


def _pointers(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and biases; values where there are none."""
    values, scales, bias = weights
    return values, values if scales is None else scales, values if bias is None else bias


def _gate(limit: float | None, alpha: float) -> dict[str, Any]:
    return {"limit": 0.0 if limit is None else limit, "alpha": alpha, "LIMITED": limit is not None}


def _groups(weights: ExpertWeights) -> int:
    return 1 if weights.scales is None else weights.scales.shape[1]
