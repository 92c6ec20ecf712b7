"""Mixture of experts: tokens sorted by expert and back, and the product of each expert's tokens with its weights.

Legend: T tokens, k experts per token, E experts, D or K input width, N output width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of
from hone.ops.linear.shapes import power_of_2
from hone.ops.moe import reference


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, *, starts: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """x [T, K], rows sorted by expert, times the transpose of their expert's weight [E, N, K]: [T, N], differentiable.

    ends int32 [E]: the end of each expert's rows (from `permute`), non-decreasing, at most T, which a GPU does not check. With `starts`
    int32 [E, n] rows lie in n pieces one after the other, each sorted by expert: ends [E, n] are those of each expert's span in each
    piece (`takes_pieces` says where). Rows after a piece's last end are nobody's: their results mean nothing, and they have no part in a
    gradient; x must be finite there. x and weight have one dtype; sums are float32 inside. Raises SpecError for shapes that do not fit.
    """
    if (
        x.dim() != 2
        or weight.dim() != 3
        or x.shape[1] != weight.shape[2]
        or (ends.shape != weight.shape[:1] if starts is None else ends.shape != starts.shape or ends.dim() != 2)
        or len(ends) != len(weight)
        or not len(weight)
    ):
        raise SpecError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, ends {tuple(ends.shape)}, "
            f"starts {None if starts is None else tuple(starts.shape)} do not fit",
            fix="give x [T, K], weight [E, N, K] of at least one expert, and the ends [E] of permute, or starts and ends [E, n]",
        )
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chosen = _product_of(x, weight, backend, grad=grad or starts is not None)
    if starts is not None and chosen not in ("gluon", "reference"):
        raise SpecError(
            f"backend '{chosen}' takes no rows in pieces", fix="sort all rows by expert, and leave starts out"
        )
    if chosen == "triton":
        if grad:
            raise SpecError(
                f"backend 'triton' has no gradient, but x.requires_grad is {x.requires_grad}, weight's {weight.requires_grad}",
                fix="leave backend out, give 'torch', or call it under torch.no_grad()",
            )
        return _few_tokens_op(x, weight, ends)
    if chosen == "gluon":
        return _many_tokens_op(_aligned(x), _aligned(weight), ends, starts)
    if chosen == "torch":
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return reference.grouped_linear(x, weight, ends, starts)


def takes_pieces(x: Tensor, *weights: Tensor) -> bool:
    """Whether `grouped_linear` of rows like those of x, and of others of its dtype, with `weights` takes rows in pieces."""
    return all(_product_of(x, one, None, grad=True) in ("gluon", "reference") for one in weights)


def _product_of(x: Tensor, weight: Tensor, backend: str | None, *, grad: bool) -> str:
    return backend_of(
        "grouped_linear", x.device, backend, dtype=x.dtype, num_rows=len(x), num_experts=len(weight),
        sizes=(weight.shape[1], weight.shape[2]), grad=grad,
    )  # fmt: skip


def permute(
    x: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    *,
    pieces: tuple[int, int] | None = None,
    leaves_out: bool = False,
    any_order: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows [T * k, D] of x [T, D] sorted by expert, ends int32 [E], place int32 [T, k]); differentiable in x.

    expert_ids integer [T, k], each in [0, num_experts). The sort is stable: an expert's rows keep the tokens' order, but with `any_order`,
    which is faster on a GPU and for products of single rows.
    ends[e] is the end of expert e's rows; place[t, j] is the row of token t for its j-th expert. With `pieces` (n, C) the experts are
    those of n ranks, E / n each, and the rows of a rank's begin at a multiple of C: rows are [n * C, D], of which those that nobody
    asked for are copies of token 0, `place` has the gaps, and `ends` does not. Where a rank's experts have more than C rows, some
    are overwritten: whoever gives C must look at `ends`. With `leaves_out` ids may be num_experts, nobody, whose rows come last, behind
    ends[-1], and mean nothing; the device alone knows how many they are, and there is no gradient. Raises SpecError for shapes that do not fit, and in plain torch for ids
    out of range (a kernel does not check).
    """
    if x.dim() != 2 or expert_ids.dim() != 2 or len(x) != len(expert_ids) or expert_ids.is_floating_point():
        raise SpecError(
            f"x {tuple(x.shape)} must be [T, D] and expert_ids {expert_ids.dtype} {tuple(expert_ids.shape)} integer [T, k]",
            fix="flatten batch and sequence to T rows in both, and give the indices of topk, not its values",
        )
    if pieces is not None and (num_experts % pieces[0] or pieces[1] < 1 or not len(x)):
        raise SpecError(
            f"pieces {pieces} do not fit {num_experts} experts and {len(x)} tokens",
            fix="give as many pieces as divide the experts, and room for one row or more",
        )
    assert pieces is None or not leaves_out, "rows in pieces are all somebody's"
    if backend_of("permute", x.device, backend, dtype=x.dtype) == "triton":
        place, order, ends = (_list_op if any_order else _order_op)(expert_ids, num_experts + leaves_out)
        if leaves_out:
            ends = ends[:-1]
            return _take_rows_op(x, order, place, ends), ends, place
        if pieces is not None:
            place, order = _spread_op(expert_ids, place, ends, *pieces)
        return _take_rows_op(x, order, place), ends, place
    if len(x) and not 0 <= int(expert_ids.min()) <= int(expert_ids.max()) < num_experts + leaves_out:
        raise SpecError(
            f"expert_ids are {int(expert_ids.min())} ... {int(expert_ids.max())}, but experts 0 ... {num_experts - 1}",
            fix="give the router's number of outputs as num_experts, or ids below it",
        )
    rows, ends, place = reference.permute(x, expert_ids, num_experts, pieces)
    return rows, ends[:num_experts], place


def unpermute(
    y: Tensor, place: Tensor, weights: Tensor | None = None, *, ends: Tensor | None = None, in_pieces: bool = False,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """[T, D]: each token's k rows of y [T * k, D] summed, times weights [T, k] where given; differentiable in both.

    place integer [T, k] from `permute`; `in_pieces`: y has the rows of its `pieces`, [n * C, D]; `ends`: of a `permute` that leaves
    out, whose rows behind ends[-1] are not added, whatever they are, and there is no gradient. Sums are float32 inside. Raises
    SpecError for shapes that do not fit.
    """
    if (
        y.dim() != 2
        or place.dim() != 2
        or (place.numel() != len(y) and not in_pieces)
        or (weights is not None and weights.shape != place.shape)
    ):
        given = None if weights is None else tuple(weights.shape)
        raise SpecError(
            f"y {tuple(y.shape)}, place {tuple(place.shape)}, weights {given} do not fit",
            fix="give y [T * k, D], the place [T, k] of permute, and weights [T, k] or None",
        )
    if backend_of("permute", y.device, backend, dtype=y.dtype) == "triton":
        return _combine_op(y, place, weights, ends)
    if ends is not None:
        y = y.masked_fill((torch.arange(len(y), device=y.device) >= ends[-1])[:, None], 0)
    return reference.unpermute(y, place, weights)


# The GPU path: hone.ops.moe.triton_kernels as torch ops.


FEW_IDS = 4096
"""Up to this many entries are sorted by comparing each with all, in one kernel."""

COMPARED_IDS = 2048
"""Up to this many entries that is as fast as counting them."""


@torch.library.custom_op("hone::expert_order", mutates_args=())
def _order_op(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(place int32 [T, k], order int32 [T * k], ends int32 [E])."""
    from hone.ops.moe.triton_kernels import count_experts, place_by_expert, place_few

    ids = expert_ids.contiguous()
    place, order, ends = _order_fake(expert_ids, num_experts)
    num_ids = ids.numel()
    if not num_ids:
        return place, order, ends.zero_()
    if num_ids <= FEW_IDS:
        programs = -(-num_ids // 16) + -(-num_experts // 16)
        place_few[(programs,)](
            ids, place, order, ends, num_ids, num_experts, IDS=max(16, power_of_2(num_ids)), MINE=16, num_warps=8
        )
        return place, order, ends
    # A block puts its own entries in order by and by, 64 at a time where there are 128 experts: many small blocks are faster.
    block = 64 if num_ids <= 8192 else max(256, power_of_2(-(-num_ids // 128)))
    blocks, experts = -(-num_ids // block), max(16, power_of_2(num_experts))
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
    count_experts[(blocks,)](ids, counts, num_ids, num_experts, EXPERTS=experts, BLOCK=block, num_warps=4)
    place_by_expert[(blocks,)](
        ids, counts, place, order, ends, num_ids, num_experts, blocks,
        EXPERTS=experts, BLOCK=block, STEP=max(16, min(256, block, 8192 // experts)), num_warps=4 if block == 64 else 8,
    )  # fmt: skip
    return place, order, ends


@torch.library.custom_op("hone::expert_lists", mutates_args=())
def _list_op(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `_order_op`, but entries of an expert are in any order, which may differ between two calls: for products of rows alone."""
    from hone.ops.moe.triton_kernels import count_visits, list_few, list_visits

    ids = expert_ids.contiguous()
    num_ids, experts = ids.numel(), max(16, power_of_2(num_experts))
    if num_ids <= COMPARED_IDS:
        return _order_op(ids, num_experts)
    place, order, ends = _order_fake(expert_ids, num_experts)
    if num_ids <= FEW_IDS:
        padded = max(16, power_of_2(num_ids))
        list_few[(1,)](
            ids, place, order, ends, num_ids, num_experts,
            IDS=padded, EXPERTS=experts, num_warps=max(4, min(32, padded // 64)),
        )  # fmt: skip
        return place, order, ends
    counts = torch.zeros(2, num_experts, dtype=torch.int32, device=ids.device)
    block = max(16, min(256, 8192 // experts))
    count_visits[(-(-num_ids // 1024),)](ids, counts, num_ids, BLOCK=1024, num_warps=4)
    list_visits[(-(-num_ids // block),)](
        ids, counts, counts[1], place, order, ends, num_ids, num_experts, BLOCK=block, EXPERTS=experts, num_warps=4
    )
    return place, order, ends


@_list_op.register_fake
def _list_fake(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return _order_fake(expert_ids, num_experts)


@_order_op.register_fake
def _order_fake(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    place = torch.empty(expert_ids.shape, dtype=torch.int32, device=expert_ids.device)
    return place, place.new_empty(expert_ids.numel()), place.new_empty(num_experts)


@torch.library.custom_op("hone::spread_places", mutates_args=())
def _spread_op(expert_ids: Tensor, place: Tensor, ends: Tensor, num_pieces: int, room: int) -> tuple[Tensor, Tensor]:
    """As `reference.spread`."""
    from hone.ops.moe.triton_kernels import spread_places

    ids = expert_ids.contiguous()
    to, order = _spread_fake(expert_ids, place, ends, num_pieces, room)
    block = 512
    programs = -(-ids.numel() // block) + -(-len(order) // block)
    spread_places[(programs,)](
        ids, place, ends, to, order, ids.numel(), len(order), room, len(ends) // num_pieces, BLOCK=block, num_warps=4
    )
    return to, order


@_spread_op.register_fake
def _spread_fake(expert_ids: Tensor, place: Tensor, ends: Tensor, num_pieces: int, room: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(place), place.new_empty(num_pieces * room)


def piece_spans(
    counts: Tensor, index: int, room: int | None, into: tuple[Tensor, Tensor], *, backend: str | None = None
) -> None:
    """Writes into (ends, starts), int32 [E / n, n], where the rows of each expert of rank `index` lie in each rank's piece, for `grouped_linear`.

    counts int64 [n, E], on one device with them: rows of each rank for each expert. Pieces begin at a multiple of `room`, and what is
    larger is cut off at its end; None: each begins where the one before ends.
    """
    ends, starts = into
    if backend_of("permute", counts.device, backend, dtype=torch.bfloat16) == "triton":
        from hone.ops.moe.triton_kernels import piece_spans as kernel

        own, pieces = ends.shape
        kernel[(1,)](
            counts, ends, starts, index * own, room or 0, own, pieces,
            EXPERTS=power_of_2(own), PIECES=power_of_2(pieces), num_warps=4,
        )  # fmt: skip
        return
    for one, made in zip(into, reference.piece_spans(counts, index, room), strict=True):
        one.copy_(made)


@torch.library.custom_op("hone::take_rows", mutates_args=())
def _take_rows_op(x: Tensor, order: Tensor, place: Tensor, ends: Tensor | None = None) -> Tensor:
    """x [T, D] -> [T * k, D]: row i is token order[i] // k. With `ends` rows from ends[-1] on are not written."""
    from hone.ops.moe.triton_kernels import gather_rows

    x = x if x.stride(-1) == 1 else x.contiguous()
    out = _take_rows_fake(x, order, place)
    if out.numel():
        width = x.shape[1]
        block = min(2048, power_of_2(width))
        rows = max(1, 4096 // block)
        gather_rows[(-(-len(out) // rows), -(-width // block))](
            x, order, order if ends is None else ends[-1:], out, x.stride(0), len(out), width, place.shape[1],
            SOME=ends is not None, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@_take_rows_op.register_fake
def _take_rows_fake(x: Tensor, order: Tensor, place: Tensor, ends: Tensor | None = None) -> Tensor:
    return torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)


@torch.library.custom_op("hone::combine_rows", mutates_args=())
def _combine_op(y: Tensor, place: Tensor, weights: Tensor | None, ends: Tensor | None = None) -> Tensor:
    """y [T * k, D] -> [T, D]; with `ends` without rows from ends[-1] on."""
    from hone.ops.moe.triton_kernels import combine_rows

    y = y if y.stride(-1) == 1 else y.contiguous()
    place = place.contiguous()
    out = _combine_fake(y, place, weights)
    if out.numel():
        width, top_k = y.shape[1], place.shape[1]
        block = min(2048, power_of_2(width))
        combine_rows[(len(out), -(-width // block))](
            y, place, place if weights is None else weights.contiguous(), place if ends is None else ends[-1:], out,
            y.stride(0), width, top_k, WEIGHTED=weights is not None, SOME=ends is not None, TOP_K=power_of_2(top_k), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


@_combine_op.register_fake
def _combine_fake(y: Tensor, place: Tensor, weights: Tensor | None, ends: Tensor | None = None) -> Tensor:
    return torch.empty(len(place), y.shape[1], dtype=y.dtype, device=y.device)


@torch.library.custom_op("hone::combine_rows_backward", mutates_args=())
def _combine_backward_op(upstream: Tensor, y: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient by y, gradient by weights)."""
    from hone.ops.moe.triton_kernels import combine_rows_backward

    upstream, y = (x if x.stride(-1) == 1 else x.contiguous() for x in (upstream, y))
    place, weights = place.contiguous(), weights.contiguous()
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    grad_weights = torch.empty(weights.shape, dtype=torch.float32, device=y.device)
    if y.numel():
        combine_rows_backward[(place.numel(),)](
            upstream, y, place, weights, grad_y, grad_weights, upstream.stride(0), y.stride(0), y.shape[1],
            place.shape[1], BLOCK=min(2048, power_of_2(y.shape[1])), num_warps=4,
        )  # fmt: skip
    return grad_y, grad_weights.to(weights.dtype)


@_combine_backward_op.register_fake
def _combine_backward_fake(upstream: Tensor, y: Tensor, place: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device), torch.empty_like(weights)


def _combine_grad(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    y, place, weights = ctx.saved_tensors
    assert ctx.ends is None, "rows that are left out have no gradient"
    given = upstream.new_ones(place.shape) if weights is None else weights
    grad_y, grad_weights = _combine_backward_op(upstream, y, place, given)
    return grad_y, None, None if weights is None else grad_weights, None


def _combine_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.ends = inputs[3]


_combine_op.register_autograd(_combine_grad, setup_context=_combine_setup)
_take_rows_op.register_autograd(
    lambda ctx, upstream: (_combine_op(upstream, ctx.saved_tensors[0], None), None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[2]),
)


def _aligned(x: Tensor) -> Tensor:
    """x as the tensor memory accelerator reads it: contiguous, at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if torch.compiler.is_compiling() or x.data_ptr() % 16 == 0 else x.clone()


@torch.library.custom_op("hone::grouped_linear", mutates_args=())
def _many_tokens_op(x: Tensor, weight: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    from hone.ops.moe.gluon_grouped import by_rows

    return by_rows(x, weight, ends, turned=False, starts=starts)


@_many_tokens_op.register_fake
def _many_tokens_fake(x: Tensor, weight: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    return torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)


@torch.library.custom_op("hone::grouped_linear_by_x", mutates_args=())
def _grad_x_op(upstream: Tensor, weight: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    from hone.ops.moe.gluon_grouped import by_rows

    return by_rows(upstream, weight, ends, turned=True, starts=starts)


@_grad_x_op.register_fake
def _grad_x_fake(upstream: Tensor, weight: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    return torch.empty(len(upstream), weight.shape[2], dtype=upstream.dtype, device=upstream.device)


@torch.library.custom_op("hone::grouped_linear_by_weight", mutates_args=())
def _grad_weight_op(upstream: Tensor, x: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    from hone.ops.moe.gluon_grouped_sums import by_weights

    return by_weights(upstream, x, ends, starts=starts)


@_grad_weight_op.register_fake
def _grad_weight_fake(upstream: Tensor, x: Tensor, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    return torch.empty(len(ends), upstream.shape[1], x.shape[1], dtype=x.dtype, device=x.device)


def _many_tokens_grad(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    x, weight, ends, starts = ctx.saved_tensors
    upstream = _aligned(upstream)
    by_x = _grad_x_op(upstream, weight, ends, starts) if ctx.needs_input_grad[0] else None
    by_weight = _grad_weight_op(upstream, x, ends, starts) if ctx.needs_input_grad[1] else None
    return by_x, by_weight, None, None


_many_tokens_op.register_autograd(
    _many_tokens_grad, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("hone::few_tokens_linear", mutates_args=())
def _few_tokens_op(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from hone.ops.moe.triton_kernels import few_tokens

    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    out = _few_tokens_fake(x, weight, ends)
    num_experts, num_out, num_in = weight.shape
    if out.numel():
        block_n, block_k, stages, warps = few_shape(num_out, num_in)
        few_tokens[(num_experts * -(-num_out // block_n),)](
            x, weight, ends, out, x.stride(0), weight.stride(0), weight.stride(1), num_experts, num_out, num_in,
            EVEN_K=num_in % block_k == 0, TOKENS=16, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out


def few_shape(num_out: int, num_in: int) -> tuple[int, int, int, int]:
    """(BLOCK_N, BLOCK_K, stages, warps) of the few-token product."""
    return min(64, max(16, power_of_2(num_out))), min(128, max(16, power_of_2(num_in))), 3, 4


@_few_tokens_op.register_fake
def _few_tokens_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
