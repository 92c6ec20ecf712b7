"""A layer of experts without a gradient: the router's choice, and the SwiGLU experts of the tokens that chose them.

Legend: T tokens, k experts a token, E experts, D width, F inner width of an expert. Nothing here waits for a GPU, and no shape
depends on what is chosen.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.activation.api import clamped_swiglu, swiglu
from hone.ops.dispatch import backend_of
from hone.ops.linear.codes import KINDS
from hone.ops.moe import reference
from hone.ops.moe.api import _list_op, grouped_linear, permute, unpermute
from hone.ops.moe.local import LocalExperts
from hone.ops.moe.rules import WIDENED_BYTES
from hone.ops.moe.weights import ExpertWeights, Rounding, check_weights


def choose_experts(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    logit_bias: Tensor | None = None,
    local: LocalExperts | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]): the k experts with the largest score of x [T, D], best first.

    Scores are the softmax or sigmoids of x times weight [E, D] transposed plus `logit_bias` [E], summed in float32; `bias` [E] is added
    for the choice alone; weights are scores, made to sum to 1 with `normalize`, times `scale`. With `local` ids are those of this rank's slots,
    `local.num_slots` for experts that other ranks compute. No gradient. Raises SpecError for shapes that do not fit.
    """
    fits = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1] and x.shape[1] > 0
    biases = [one for one in (bias, logit_bias) if one is not None]
    if not fits or not 0 < top_k <= len(weight) or any(one.shape != (len(weight),) for one in biases):
        given = ", ".join(str(tuple(one.shape)) for one in biases) or None
        raise SpecError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {given} and top_k {top_k} do not fit",
            fix="give x [T, D], weight [E, D], bias [E] or None, and a top_k from 1 to E",
        )
    if score not in ("softmax", "sigmoid"):
        raise SpecError(f"score is {score!r}", fix="give 'softmax' or 'sigmoid'")
    if local is not None:
        local.check(len(x), len(weight))
    same = x.dtype if x.dtype == weight.dtype else None
    sigmoid = score == "sigmoid"
    if backend_of("choose_experts", x.device, backend, dtype=same, num_experts=len(weight), top_k=top_k) == "triton":
        return _choose_op(x, weight, bias, logit_bias, top_k, sigmoid, normalize, scale, *(local or (None,) * 6))
    options = {"sigmoid": sigmoid, "normalize": normalize, "scale": scale}
    ids, weights = reference.choose_experts(x, weight, bias, top_k, logit_bias=logit_bias, **options)  # type: ignore[arg-type]
    return ids if local is None else local.slots_of(ids), weights


def expert_swiglu(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    limit: float | None = None,
    alpha: float = 1.702,
    local_share: float = 1.0,
    rounding: Rounding | None = None,
    backend: str | None = None,
) -> Tensor:
    """[T, D]: of each token of x [T, D] the sum of its experts' SwiGLU feed-forwards, times weights float32 [T, k].

    With `limit` the gate is gpt-oss's (`clamped_swiglu`), `alpha` its factor.     ids integer [T, k], each in [0, E), which a GPU does not check; gate_up
    [E, 2 F, D], gate first, and down [E, D, F], dense or codes, with or without biases. Where experts are divided over ranks, `local_share` is the share of visits that is expected to be of this rank's: below 1
    ids may be E, nobody, whose visits add nothing and of which nothing is read. With `rounding` the inputs of gate and up and those of
    down are rounded to 8 bits, each row with its own scale (W8A8), where experts are codes without biases. Sums are float32. No gradient. Raises SpecError for
    shapes that do not fit.
    """
    if rounding is not None and (
        rounding not in KINDS or gate_up.kind == "dense" or gate_up.bias is not None or down.bias is not None
    ):
        raise SpecError(
            f"rounding {rounding!r} does not fit {gate_up.kind} weights with biases {gate_up.bias is not None, down.bias is not None}",
            fix="give 'int8' or 'fp8' with codes without biases, or None",
        )
    for name, own in (("gate_up", gate_up), ("down", down)):
        check_weights(name, own)
    (experts, both, width), (others, out, inner) = gate_up.sizes, down.sizes
    if x.dim() != 2 or ids.dim() != 2 or len(ids) != len(x) or weights.shape != ids.shape or ids.is_floating_point():
        raise SpecError(
            f"x {tuple(x.shape)}, ids {ids.dtype} {tuple(ids.shape)} and weights {tuple(weights.shape)} do not fit",
            fix="give x [T, D], and ids and weights [T, k] as choose_experts returns them",
        )
    if (experts, both, width, width) != (others, 2 * inner, x.shape[1], out):
        raise SpecError(
            f"x {tuple(x.shape)}, gate_up {gate_up.sizes} and down {down.sizes} do not fit",
            fix="give gate_up [E, 2 F, D], gate and up stacked, and down [E, D, F] of equally many experts",
        )
    kinds = {gate_up.kind, down.kind}
    plain = not (torch.is_grad_enabled() and (x.requires_grad or gate_up.values.requires_grad))
    same = gate_up.kind != "dense" or gate_up.values.dtype == x.dtype == down.values.dtype
    chosen = backend_of(
        "expert_swiglu", x.device, backend, dtype=x.dtype if same else None, visits=int(ids.numel() * local_share), num_experts=experts,
        sizes=(inner, width), kind=gate_up.kind if len(kinds) == 1 else "mixed", plain=plain,
    )  # fmt: skip
    if chosen == "triton":
        return _experts_op(x, ids, weights, *gate_up, *down, local_share, limit, alpha, rounding)
    if chosen == "grouped":
        some = local_share < 1
        rows, ends, place = permute(
            x if rounding is None else reference.rounded(x, rounding), ids, experts, leaves_out=some
        )
        both = _product(rows, gate_up, ends)
        inner_rows = swiglu(both) if limit is None else clamped_swiglu(both, limit, alpha)
        made = _product(inner_rows if rounding is None else reference.rounded(inner_rows, rounding), down, ends)
        return unpermute(made, place, weights, ends=ends if some else None)
    return reference.expert_swiglu(x, ids, weights, gate_up, down, limit, alpha, rounding)


def _product(rows: Tensor, weights: ExpertWeights, ends: Tensor) -> Tensor:
    """rows [R, K] times their experts' weights: codes are widened once, some experts at a time, in memory that the next ones take again."""
    if weights.kind == "dense":
        made = grouped_linear(rows, weights.values, ends)
    else:
        made = _widened_product(rows, weights, ends)
    return made if weights.bias is None else reference.add_bias(made, weights.bias, ends)


def _widened_product(rows: Tensor, weights: ExpertWeights, ends: Tensor) -> Tensor:
    from hone.ops.moe.gluon_grouped import by_rows
    from hone.ops.moe.triton_widen import widened

    experts, features, columns = weights.sizes
    each = max(1, WIDENED_BYTES // (features * columns * rows.element_size()))
    starts = F.pad(ends, (1, 0))[:-1]
    out = rows.new_empty(len(rows), features)
    for first in range(0, experts, each):
        own = slice(first, first + each)
        some = ExpertWeights(*(None if one is None else one[own] for one in weights)).contiguous()  # type: ignore[arg-type]
        by_rows(rows, widened(some, rows.dtype), ends[own, None], starts=starts[own, None], out=out)
    return out


@torch.library.custom_op("hone::choose_experts", mutates_args=("counts",))
def _choose_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    slots: Tensor | None,
    copies: Tensor | None,
    num_slots: int | None,
    key: Tensor | None,
    counts: Tensor | None,
    real: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The last six are the fields of `LocalExperts`."""
    from hone.ops.moe.triton_routing import launch_route

    x = x if x.stride(-1) == 1 else x.contiguous()
    ids, weights = _chosen(x, top_k)
    local = None
    if slots is not None and copies is not None and num_slots is not None:
        key, real = (None if one is None else one.contiguous() for one in (key, real))
        local = LocalExperts(slots, copies, num_slots, key, counts, real)
    launch_route(
        x, weight.contiguous(), *(None if one is None else one.contiguous() for one in (bias, logit_bias)), ids, weights, local,
        sigmoid=sigmoid, normalize=normalize, scale=scale,
    )  # fmt: skip
    return ids, weights


def _chosen(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    return ids, torch.empty(len(x), top_k, dtype=torch.float32, device=x.device)


@_choose_op.register_fake
def _choose_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, logit_bias: Tensor | None, top_k: int, *_: object
) -> tuple[Tensor, Tensor]:
    return _chosen(x, top_k)


@torch.library.custom_op("hone::expert_swiglu", mutates_args=())
def _experts_op(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scales: Tensor | None,
    down_bias: Tensor | None,
    local_share: float,
    limit: float | None,
    alpha: float,
    rounding: str | None,
) -> Tensor:
    from hone.ops.moe.launch_experts import SEARCHED, launch_experts

    x = x if x.stride(-1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous().float()
    both = ExpertWeights(gate_up, gate_up_scales, gate_up_bias).contiguous()
    last = ExpertWeights(down, down_scales, down_bias).contiguous()
    # Nobody's visits come last.
    listed = _list_op(ids, len(gate_up) + (local_share < 1))[1:] if ids.numel() > SEARCHED else None
    return launch_experts(
        x, ids, weights, both, last, listed, local_share, limit, alpha, cast(Rounding | None, rounding)
    )


@_experts_op.register_fake
def _experts_fake(x: Tensor, ids: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
