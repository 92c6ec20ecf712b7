"""LoRA of many adapters at once, as a server needs it: every row of x has the factors of the slot that holds its adapter.

`lora_shrink` before the linear's own product and `lora_expand` after it add s (x A^T) B^T to the rows that have a slot. Shapes: T
rows, K input features, N output features of a linear whose P pieces (q, k, v) are stacked, R largest rank of a piece, S parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.dispatch import backend_of, locate
from hone.ops.linear.api import linear
from hone.ops.linear.shapes import slotted_shape
from hone.ops.lora import reference


def lora_shrink(x: Tensor, downs: Tensor, slots: Tensor, ranks: Tensor, *, backend: str | None = None) -> Tensor:
    """x A^T by the A of each row's slot: float32 [S, T, P, R], to be summed over S, undefined where a row has no slot or beyond its rank.

        downs [slots, P R, K] in x's dtype, each slot contiguous: the rows of piece p begin at p R. slots int32 [T]: -1 is a row without an
        adapter. ranks int32 [slots, P]: 0 where the slot's adapter leaves the piece as it is. On a GPU slots, ranks and factors must be older
    than the last kernel before this one, which reads them early (`hone.ops.early`). No gradient. Punica, arXiv:2310.18547.
        Raises SpecError for tensors that do not fit.
    """
    fits = x.dim() == 2 and downs.dim() == 3 and ranks.dim() == 2 and downs.shape[2] == x.shape[1]
    if not fits or len(ranks) != len(downs) or downs.shape[1] % max(ranks.shape[1], 1) or downs.dtype != x.dtype:
        raise SpecError(
            f"x {_said(x)}, downs {_said(downs)} and ranks {_said(ranks)} do not fit",
            fix="give x [T, K], downs [slots, P R, K] of its dtype and ranks [slots, P]",
        )
    _check_rows(slots, ranks, x)
    rank = downs.shape[1] // ranks.shape[1]
    if backend_of("lora_shrink", x.device, backend, dtype=x.dtype, rank=rank) == "reference":
        return reference.shrink(x, downs, slots, ranks)
    from hone.ops.lora.triton_slots import launch_shrink

    return launch_shrink(x if x.stride(1) == 1 else x.contiguous(), downs, slots, ranks)


def lora_expand(
    narrow: Tensor,
    ups: Tensor,
    slots: Tensor,
    ranks: Tensor,
    y: Tensor,
    widths: Sequence[int],
    *,
    factors: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Adds u B^T to y [T, N] in place, by the B of each row's slot, and returns y; u is `narrow`, of `lora_shrink`, summed over S.

    ups [slots, N, R] in y's dtype, each slot contiguous, hold s B; `widths` are the output features of each piece. factors float32
    [slots, N, 2]: y is first multiplied by the first and then shifted by the second (DoRA, (IA)3). slots and ranks are those of
    `lora_shrink`. No gradient. Raises SpecError for tensors that do not fit.
    """
    pieces, rank = narrow.shape[2:] if narrow.dim() == 4 else (0, 0)
    fits = ups.dim() == 3 and y.dim() == 2 and ups.shape[1:] == (y.shape[1], rank) and ups.dtype == y.dtype
    if not fits or narrow.shape[1] != len(y) or len(widths) != pieces or sum(widths) != y.shape[1]:
        raise SpecError(
            f"narrow {_said(narrow)}, ups {_said(ups)}, y {_said(y)} and widths {list(widths)} do not fit",
            fix="give narrow [S, T, P, R], ups [slots, N, R] and y [T, N] of one dtype, and P widths that make N",
        )
    if ranks.shape != (len(ups), pieces):
        raise SpecError(f"ranks {_said(ranks)}, ups {_said(ups)}", fix="give ranks [slots, P]")
    _check_rows(slots, ranks, y)
    if factors is not None and factors.shape != (len(ups), y.shape[1], 2):
        raise SpecError(f"factors {_said(factors)}, ups {_said(ups)}", fix="give factors float32 [slots, N, 2]")
    if backend_of("lora_expand", y.device, backend, dtype=y.dtype, rank=rank) == "reference" or y.stride(1) != 1:
        return reference.expand(narrow, ups, slots, ranks, y, widths, factors)
    from hone.ops.lora.triton_slots import launch_expand

    launch_expand(narrow, ups, slots, ranks, y, widths, factors)
    return y


def slotted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    downs: Tensor,
    ups: Tensor,
    slots: Tensor,
    ranks: Tensor,
    widths: Sequence[int],
    *,
    groups: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """x W^T + b + s (x A^T) B^T: [T, N] in x's dtype; the arguments are those of `linear`, `lora_shrink` and `lora_expand`.

    While few rows decode on a GPU it is one product with the factors as more columns of the weight, rounded once, and a small kernel
    in front of it; a row's result is then that of the other rows' adapters whatever they are. Numbers of the factors beyond a rank
    must be finite there. groups: what `slot_groups` found in `slots`, for all linears of a pass; found here otherwise. No gradient.
    Raises SpecError for tensors that do not fit.
    """
    rank = ups.shape[2] if ups.dim() == 3 else 0
    if (
        x.dim() != 2
        or weight.dim() != 2
        or weight.shape[1] != x.shape[1]
        or ups.dim() != 3
        or ups.shape[1] != len(weight)
    ):
        raise SpecError(
            f"x {_said(x)}, weight {_said(weight)} and ups {_said(ups)} do not fit",
            fix="give x [T, K], weight [N, K] and ups [slots, N, R]",
        )
    if downs.shape != (len(ups), len(widths) * rank, x.shape[1]) or ranks.shape != (len(ups), len(widths)):
        raise SpecError(
            f"downs {_said(downs)}, ranks {_said(ranks)}, ups {_said(ups)} and widths {list(widths)} do not fit",
            fix="give downs [slots, P R, K], ranks [slots, P] and P widths",
        )
    if sum(widths) != len(weight):
        raise SpecError(f"widths are {list(widths)}, of {len(weight)} output features", fix="give widths that make N")
    _check_rows(slots, ranks, x)
    block = slotted_shape(max(1, len(x)), len(weight), x.shape[1]).block_n
    case = {
        "dtype": x.dtype if {x.dtype} == {one.dtype for one in (weight, downs, ups)} else None,
        "rows": len(x),
        "in_features": x.shape[1],
        "rank": rank,
        "fits": len(x) > 0 and len(widths) <= 3 and not any(width % block for width in widths[:-1]),
    }
    if backend_of("slotted_linear", x.device, backend, **case) == "products":
        narrow = lora_shrink(x, downs, slots, ranks)
        return lora_expand(narrow, ups, slots, ranks, linear(x, weight, bias), widths)
    from hone.ops.lora.triton_slotted import launch_groups, slotted_product

    fresh, rows = groups is None, x if x.stride(1) == 1 else x.contiguous()
    groups = launch_groups(slots, len(widths) * rank // 16) if groups is None else groups
    return slotted_product(rows, weight, bias, downs, ups, groups, ranks, widths, fresh=fresh)


def slot_groups(slots: Tensor, *, rank: int, pieces: int) -> Tensor | None:
    """What `slotted_linear` reads of slots [T] for linears of up to `pieces` pieces of ranks up to `rank`; None where it needs nothing."""
    if slots.device.type != "cuda" or not locate(slots.device).runs_triton or not 0 < len(slots) <= 64:
        return None
    from hone.ops.lora.triton_slotted import launch_groups

    return launch_groups(slots, pieces * rank // 16)


def _check_rows(slots: Tensor, ranks: Tensor, x: Tensor) -> None:
    if slots.shape != x.shape[:1] or slots.dtype.is_floating_point or ranks.dtype.is_floating_point:
        raise SpecError(
            f"slots {_said(slots)} and ranks {_said(ranks)}, x has {len(x)} rows",
            fix="give integers, a slot for each row",
        )
    if slots.device != x.device or ranks.device != x.device:
        raise SpecError(f"slots are on {slots.device}, ranks on {ranks.device}, x on {x.device}", fix="use one device")


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
