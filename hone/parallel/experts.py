"""Rows of tokens on their way to the ranks that hold their experts, and back: the all-to-alls of expert parallelism.

Each of the n ranks of an axis holds E / n neighbouring experts of a layer, and reads tokens of its own. What a router dispatches is sorted
by expert, so what goes to a rank is one piece of it. A rank first tells each other one how many rows it sends for each expert, then
the rows travel; where they arrive, one permutation lays together what all ranks sent for an expert. Lepikhin et al. 2020, arXiv:2006.16668 (GShard).

    exchange.dispatch(rows, ends)      starts to send        (backward: waits for the rows' gradients)
        .arrived()                     waits                 (backward: starts to send gradients back)
    exchange.combine(made, sent)       starts to send back   (backward: waits)
        .arrived()                     waits                 (backward: starts)

Work between a start and its wait is done beside the transfer, in both directions. Sums over tokens stay sums: nothing is divided by n.
Legend: R rows of this rank, S rows for its experts, D width, E experts, n ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hone.ops import permute, unpermute
from hone.parallel.axis import Axis, Transfer


class Coming(Protocol):
    """Rows on their way to this rank."""

    def arrived(self) -> tuple[Tensor, Tensor]:
        """(rows [S, D] sorted by this rank's experts, ends int32 [E / n] of each expert's) when they are there."""


class Returning(Protocol):
    """What experts made of this rank's rows, on its way back."""

    def arrived(self) -> Tensor:
        """[R, D] in the order of the rows that were sent, when it is there."""


class ExpertExchange(Protocol):
    """The transfers of the rows of experts that the ranks of an axis hold, differentiable.

    Every rank calls `dispatch` and `combine` in the same order, and uses what they return to its end.
    """

    def dispatch(self, rows: Tensor, ends: Tensor) -> Coming:
        """Starts to send `rows` [R, D], sorted by expert, of which each expert's end at `ends` int32 [E]."""

    def combine(self, made: Tensor, sent: Any) -> Returning:
        """Starts to send back `made` [S, D] of the rows that arrived from `sent`, which `dispatch` returned."""


class RowMessages:
    """`ExpertExchange` by the collectives of the process group of `axis`. How many rows come is known on the host, which waits for that."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def __deepcopy__(self, memo: dict[int, Any]) -> RowMessages:
        """A copy of a module that holds it meets the same ranks."""
        return self

    def dispatch(self, rows: Tensor, ends: Tensor) -> _Coming:
        """As `ExpertExchange.dispatch`."""
        return _Coming(self._axis, rows, ends)

    def combine(self, made: Tensor, sent: _Coming) -> _Returning:
        """As `ExpertExchange.combine`."""
        assert sent.place is not None, "rows are combined after they arrived"
        return _Returning(self._axis, unpermute(made, sent.place), sent.sizes)


class _Sizes(NamedTuple):
    """How many rows this rank gives to each rank of the axis, and takes of each."""

    given: list[int]
    taken: list[int]


class _Coming:
    """As `Coming`."""

    def __init__(self, axis: Axis, rows: Tensor, ends: Tensor) -> None:
        given = ends.detach().long().diff(prepend=ends.new_zeros(1, dtype=torch.int64)).view(axis.size, -1)
        self._taken = torch.empty_like(given)
        _done(axis.all_to_all(self._taken, given))
        both = torch.stack([given.sum(1), self._taken.sum(1)]).tolist()
        self.sizes = _Sizes(*both)
        self.place: Tensor | None = None
        """Where each row that came lies among the rows of this rank's experts, int32 [S, 1]; None: they have not arrived."""
        self._moving, self._rows = _started(axis, rows, self.sizes)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """As `Coming.arrived`."""
        rows = _Arrived.apply(self._rows, self._moving)
        experts = torch.arange(self._taken.shape[1], device=rows.device).repeat(len(self._taken))
        experts = experts.repeat_interleave(self._taken.view(-1), output_size=len(rows))
        rows, ends, self.place = permute(rows, experts[:, None], self._taken.shape[1])
        return rows, ends


class _Returning:
    """As `Returning`."""

    def __init__(self, axis: Axis, rows: Tensor, sizes: _Sizes) -> None:
        self._moving, self._rows = _started(axis, rows, _Sizes(sizes.taken, sizes.given))

    def arrived(self) -> Tensor:
        """As `Returning.arrived`."""
        return _Arrived.apply(self._rows, self._moving)  # type: ignore[no-any-return]


class _Moving:
    """One transfer of rows, and that of their gradients the other way."""

    def __init__(self, axis: Axis, sizes: _Sizes) -> None:
        self._axis, self._sizes = axis, sizes
        self._under_way: tuple[Transfer | None, Tensor, Tensor] | None = None

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """The memory of the rows that come when `rows` are sent; nothing of it may be used before `wait`."""
        given, taken = reversed(self._sizes) if back else self._sizes
        rows = rows.contiguous()
        room = rows.new_empty(sum(taken), rows.shape[1])
        self._under_way = self._axis.all_to_all_rows(room, rows, taken, given), rows, room
        return room

    def wait(self) -> Tensor:
        """What came."""
        assert self._under_way is not None, "nothing is under way"
        (transfer, _, room), self._under_way = self._under_way, None
        _done(transfer)
        return room


def _started(axis: Axis, rows: Tensor, sizes: _Sizes) -> tuple[_Moving, Tensor]:
    """A transfer of `rows` that has begun, and the memory of what comes."""
    moving = _Moving(axis, sizes)
    return moving, _Started.apply(rows, moving)


class _Started(torch.autograd.Function):
    """Starts a transfer; backward it waits for that of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, moving: _Moving) -> Tensor:
        ctx.moving = moving
        return moving.start(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.moving.wait(), None


class _Arrived(torch.autograd.Function):
    """Waits for a transfer; backward it starts that of the gradient."""

    @staticmethod
    def forward(ctx: Any, room: Tensor, moving: _Moving) -> Tensor:
        ctx.moving = moving
        return moving.wait().view_as(room)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.moving.start(gradient, back=True)
        return gradient, None  # of the memory: what `_Started` returns is what counts


def _done(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
