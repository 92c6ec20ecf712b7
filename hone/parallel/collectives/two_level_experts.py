"""Visits of experts over two levels of ranks: a token's row goes to a node once, however many of its experts are there.

Rank l of a node sends a token's row to rank l of each node that has one of its experts; that rank passes it to the ranks of its own node that
have them, once each. What the experts of a rank make of it is weighted and summed there, then over the node, and one row of each
node comes back. Between nodes, where links are slow, a token so costs the nodes that it visits and not its experts, and a router that
limits the nodes of a token (`top_groups`) limits what it costs (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2). Differentiable.
Legend: T tokens of this rank, k experts a token, D width, E experts, m ranks of a node, n nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops import permute, unpermute
from hone.parallel.axis import Axis, Transfer

Work = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, D] sorted by this rank's experts, ends int32 [E / (m n)]) -> what its experts make of them, [S, D]."""


def visit_experts(
    inside: Axis, between: Axis, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, work: Work
) -> Tensor:
    """[T, D]: the weighted sum of what each token's experts make of it.

    `inside` are the ranks of this node in order, `between` those with this rank's place on every node. x [T, D], ids integer [T, k],
    weights [T, k]. Rank l of node i has experts (i m + l) E / (m n) and those after, E / (m n) of them. Every rank calls it.
    Raises SpecError where the ranks do not divide the experts.
    """
    ranks = inside.size * between.size
    each = num_experts // ranks
    if not each or num_experts % ranks:
        raise SpecError(
            f"{num_experts} experts cannot be divided among {between.size} nodes of {inside.size} ranks",
            fix=f"give a multiple of {ranks} experts, or fewer ranks",
        )
    to_nodes = _Way(between, ids // (each * inside.size))
    rows, ids, weights = to_nodes.go(x, ids, weights)
    first = between.index * inside.size * each
    local = torch.where(ids >= 0, ids - first, ids)
    to_ranks = _Way(inside, torch.where(local >= 0, local // each, -1))
    rows, own, shares = to_ranks.go(rows, local, weights)
    own = torch.where(own >= 0, own - inside.index * each, each)  # `each`: nobody here
    sorted_rows, ends, place = permute(rows, own, each + 1)
    count = int(ends[-2]) if len(ends) > 1 else 0
    made = work(sorted_rows[:count], ends[:-1])
    made = torch.cat([made, made.new_zeros(len(sorted_rows) - count, made.shape[1])])
    return to_nodes.back(to_ranks.back(unpermute(made, place, shares)))


class _Way:
    """Rows to the ranks of one axis: token t goes, once, to each rank in `targets[t]` (integer [T, k]; -1: to none for this visit)."""

    def __init__(self, axis: Axis, targets: Tensor) -> None:
        self._axis, self._targets, self._num_rows = axis, targets, len(targets)
        visits = torch.stack([(targets == rank).any(1) for rank in range(axis.size)])
        rank, self._source = visits.nonzero(as_tuple=True)
        given = visits.sum(1)
        taken = torch.empty_like(given)
        _done(axis.all_to_all(taken.view(-1, 1), given.view(-1, 1)))
        self._given, self._taken = given.tolist(), taken.tolist()
        self._rank = rank

    def go(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that come, with the ids of their visits here (-1: elsewhere) and these visits' weights (0 elsewhere)."""
        here = self._targets[self._source] == self._rank[:, None]
        ids = torch.where(here, ids[self._source], -1)
        shares = torch.where(here, weights[self._source], 0)
        return self._carry(x[self._source]), self._carry(ids), self._carry(shares)

    def back(self, rows: Tensor) -> Tensor:
        """The sum of what comes back for each token, [T, D], in float32 inside."""
        found = _Carried.apply(rows, self._axis, self._taken, self._given)
        whole = found.new_zeros(self._num_rows, found.shape[1], dtype=torch.promote_types(found.dtype, torch.float32))
        return whole.index_add(0, self._source, found.to(whole.dtype)).to(found.dtype)

    def _carry(self, rows: Tensor) -> Tensor:
        return _Carried.apply(rows, self._axis, self._given, self._taken)  # type: ignore[no-any-return]


class _Carried(torch.autograd.Function):
    """Rows in the order of the ranks they go to, `given` of them to each: those that come, `taken` from each; gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, given: list[int], taken: list[int]) -> Tensor:
        ctx.axis, ctx.given, ctx.taken = axis, given, taken
        ctx.set_materialize_grads(True)
        return _trade(axis, rows, given, taken)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return _trade(ctx.axis, upstream, ctx.taken, ctx.given), None, None, None


def _trade(axis: Axis, rows: Tensor, given: list[int], taken: list[int]) -> Tensor:
    rows = rows.detach().contiguous()
    out = rows.new_empty(sum(taken), *rows.shape[1:])
    sent, room = rows.split(given), out.split(taken)
    room[axis.index].copy_(sent[axis.index])
    messages = [
        [[one.view(-1)] if rank != axis.index and one.numel() else [] for rank, one in enumerate(each)]
        for each in (room, sent)
    ]
    if not rows.is_cuda or any(messages[0]) or any(messages[1]):  # on a CPU it is a collective of all
        _done(axis.trade(*messages))
    return out


def _done(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
