"""Rows of tokens on their way to the ranks that hold their experts, and back: the all-to-alls of expert parallelism.

Each of the n ranks of an axis holds E / n neighbouring experts of a layer, and reads tokens of its own. What a router dispatches is sorted
by expert, so what goes to a rank is one piece of it. All ranks first learn how many rows each has for each expert, then the rows
travel; where they arrive, products take them as they lie, or one permutation lays together what all ranks sent for an expert. Lepikhin et al. 2020, arXiv:2006.16668 (GShard).

    sent = exchange.dispatch(rows, ends)      begins             (backward: waits for the rows' gradients)
    sent.arrived()                            waits              (backward: starts to send the gradients back)
    back = exchange.combine(made, sent)       starts to return   (backward: waits)
    back.arrived()                            waits              (backward: starts)

Work between a start and its wait is done beside the transfer, in both directions. Memory and transfers have sizes, for which there are two ways:

- exact: the host waits in `sent.arrived()` until it knows how many rows there are, while the GPU does what was given to it since `dispatch`; it
  knows them in the backward pass;
- in rooms (`hone.parallel.piece_bound`): each rank's piece has the same fixed room, and the device alone knows how many of its rows are real. The
  host never waits; whoever opens the bound asks afterwards whether the rows did fit.

Sums over tokens stay sums: nothing is divided by n.
Legend: R rows of this rank, S rows for its experts, D width, E experts, n ranks; in rooms of C rows R = S = n C.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hone.ops import permute, unpermute
from hone.ops.moe.api import piece_spans
from hone.parallel.axis import Axis, Transfer
from hone.parallel.piece_bound import Counted, PieceBound


class Rows(NamedTuple):
    """Rows of this rank's experts, as `hone.ops.grouped_linear` takes them."""

    rows: Tensor
    """[S, D]"""
    ends: Tensor
    """int32 [E / n], or [E / n, n] where they lie in pieces."""
    starts: Tensor | None = None
    """int32 [E / n, n] where they lie in the pieces that the ranks sent; None: they are sorted by expert."""


class Coming(Protocol):
    """Rows on their way to this rank."""

    def arrived(self, *, in_pieces: bool = False) -> Rows:
        """The rows when they are there, sorted by expert, or `in_pieces` as they came: in rooms always, where rows after a piece's last end are
        nobody's."""


class Returning(Protocol):
    """What experts made of this rank's rows, on its way back."""

    def arrived(self) -> Tensor:
        """[R, D] in the order of the rows that were sent, when it is there."""


class ExpertExchange(Protocol):
    """The transfers of the rows of experts that the ranks of an axis hold, differentiable.

    Every rank calls `dispatch` and `combine` in the same order, and uses what they return to its end.
    """

    bound: PieceBound

    @property
    def pieces(self) -> tuple[int, int] | None:
        """(ranks, room of each rank's piece in rows), as `hone.ops.permute` lays rows for `dispatch` in rooms; None: exact sizes."""

    def dispatch(self, rows: Tensor, ends: Tensor, room: int | None = None) -> Coming:
        """Begins to send `rows` [R, D], sorted by expert, of which each expert's end at `ends` int32 [E]. With `room` the rows of each
        rank's experts begin at a multiple of it, and `ends` are those without the gaps."""

    def combine(self, made: Tensor, sent: Any) -> Returning:
        """Starts to send back `made` [S, D] of the rows that arrived from `sent`, which `dispatch` returned."""


class Sizes(NamedTuple):
    """How many rows this rank gives to each rank of the axis, and takes of each."""

    given: list[int]
    taken: list[int]
    most: int
    """The most rows that any rank gives to another one, or more."""

    @property
    def back(self) -> Sizes:
        """Those of the way back."""
        return Sizes(self.taken, self.given, self.most)


class Flight(Protocol):
    """Rows under way."""

    def land(self) -> Tensor:
        """[S, D]: what every rank sent here, rank by rank, for the work that is given from now on."""


class Carrier(Protocol):
    """How rows travel."""

    def start(self, rows: Tensor, sizes: Sizes, *, keeps: bool = True) -> Flight:
        """Starts to send `rows` [R, D], contiguous, of which each rank gets its piece. Work given since may go on beside.

        What comes is kept for as long as anyone likes; without `keeps` it is used before the next call.
        """


class RowExchange:
    """`ExpertExchange` of the ranks of `axis`, whose rows `carrier` brings."""

    def __init__(self, axis: Axis, carrier: Carrier) -> None:
        self.axis, self.carrier, self.beside = axis, carrier, _Beside()
        self.bound = PieceBound()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowExchange:
        """A copy of a module that holds it meets the same ranks."""
        return self

    @property
    def pieces(self) -> tuple[int, int] | None:
        """As `ExpertExchange.pieces`."""
        room = self.bound.room
        return None if room is None else (self.axis.size, room)

    def dispatch(self, rows: Tensor, ends: Tensor, room: int | None = None) -> _Coming:
        """As `ExpertExchange.dispatch`."""
        return _Coming(self, rows, ends, room)

    def combine(self, made: Tensor, sent: _Coming) -> _Returning:
        """As `ExpertExchange.combine`."""
        return _Returning(self, made if sent.place is None else unpermute(made, sent.place), sent.sizes)


class Messages:
    """`Carrier` by the collectives of the process group of `axis`."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def start(self, rows: Tensor, sizes: Sizes, *, keeps: bool = True) -> _Message:
        """As `Carrier.start`."""
        room = rows.new_empty(sum(sizes.taken), rows.shape[1])
        return _Message(self._axis.all_to_all_rows(room, rows, sizes.taken, sizes.given), rows, room)


class _Message:
    """As `Flight`."""

    def __init__(self, transfer: Transfer | None, rows: Tensor, room: Tensor) -> None:
        self._transfer, self._rows, self._room = transfer, rows, room

    def land(self) -> Tensor:
        """As `Flight.land`."""
        _done(self._transfer)
        if self._room.is_cuda:  # it is the memory of another stream
            self._room.record_stream(torch.cuda.current_stream(self._room.device))
        return self._room


class _Beside:
    """On a GPU, a stream beside the current one, which begins where the current one was at a mark. On a CPU there is one order of all."""

    def __init__(self) -> None:
        self._stream: Any = None

    @staticmethod
    def mark(x: Tensor) -> Any:
        """The end of the work that was given until now."""
        return torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """What is given inside waits for what was given before the mark, and for nothing later."""
        if mark is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(priority=-1)
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield


class _Counts:
    """How many rows each rank has for each expert, on its way to all of them."""

    def __init__(self, of: RowExchange, ends: Tensor, room: int | None) -> None:
        self._axis, ends = of.axis, ends.detach().long()
        self._own = ends.diff(prepend=ends.new_zeros(1))
        self.every = self._own.new_empty(of.axis.size, len(self._own))
        """int64 [n, E], for work that is given after `ready`."""
        # Made here, so that it is memory of the current stream.
        self.spans: tuple[Tensor, Tensor] = tuple(
            ends.new_empty(2, len(ends) // of.axis.size, of.axis.size, dtype=torch.int32)
        )  # type: ignore[assignment]
        """(ends, starts) of `Rows` in pieces, as `every`."""
        host, self._event = self.every, None
        with of.beside.after(of.beside.mark(ends)):
            _done(of.axis.all_gather(self.every.view(-1), self._own))
            piece_spans(self.every, of.axis.index, room, self.spans)
            if ends.is_cuda:
                host = torch.empty(self.every.shape, dtype=torch.int64, pin_memory=True)
                host.copy_(self.every, non_blocking=True)
                self._event = torch.cuda.current_stream(ends.device).record_event()
        self._counted = Counted(host, self._event, room)
        if of.bound.open:
            of.bound.counted(self._counted)

    def sizes(self) -> Sizes:
        """What this rank gives and takes; on a GPU the host waits here until it knows."""
        rows, index = self._counted.rows(), self._axis.index
        return Sizes(rows[index], [one[index] for one in rows], max(map(sum, rows)))

    def ready(self) -> Tensor:
        """int64 [n, E / n]: how many rows of each rank are for each of this rank's experts, for the work that is given from now on."""
        if self._event is not None:
            torch.cuda.current_stream(self.every.device).wait_event(self._event)
        size = self._axis.size
        return self.every.view(size, size, -1)[:, self._axis.index]


class _Coming:
    """As `Coming`."""

    def __init__(self, of: RowExchange, rows: Tensor, ends: Tensor, room: int | None) -> None:
        self._counts, self._room = _Counts(of, ends, room), room
        self.place: Tensor | None = None
        """Where each row that came lies among the rows of this rank's experts, int32 [S, 1]; None: where it came."""
        self._moving = _Moving(of)
        self._token = _Begun.apply(rows, self._moving)
        if room is not None:
            self._start(Sizes([room] * of.axis.size, [room] * of.axis.size, room))
        elif not rows.is_cuda:
            self._start(self._counts.sizes())

    def _start(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._moving.start(sizes)

    def arrived(self, *, in_pieces: bool = False) -> Rows:
        """As `Coming.arrived`."""
        if self._token.is_cuda and self._room is None:
            self._start(self._counts.sizes())
        rows = _Arrived.apply(self._token, self._moving)
        own = self._counts.ready()
        if in_pieces:
            return Rows(rows, *self._counts.spans)
        assert self._room is None, "rows in rooms are not sorted: nobody's are among them"
        experts = torch.arange(own.shape[1], device=rows.device).repeat(len(own))
        experts = experts.repeat_interleave(own.reshape(-1), output_size=len(rows))
        rows, ends, self.place = permute(rows, experts[:, None], own.shape[1])
        return Rows(rows, ends)


class _Returning:
    """As `Returning`."""

    def __init__(self, of: RowExchange, rows: Tensor, sizes: Sizes) -> None:
        self._moving = _Moving(of)
        self._token = _Begun.apply(rows, self._moving)
        self._moving.start(sizes.back)

    def arrived(self) -> Tensor:
        """As `Returning.arrived`."""
        return _Arrived.apply(self._token, self._moving)  # type: ignore[no-any-return]


class _Moving:
    """One transfer of rows, and that of their gradients the other way."""

    def __init__(self, of: RowExchange) -> None:
        self._carrier, self._beside = of.carrier, of.beside
        self._offered: tuple[Tensor, Any] | None = None
        self._sizes: Sizes | None = None
        self._flight: Flight | None = None

    def offer(self, rows: Tensor) -> None:
        """These `rows` are to be sent, as they are now."""
        rows = rows.contiguous()
        self._offered = rows, self._beside.mark(rows)

    def start(self, sizes: Sizes, *, keeps: bool = True) -> None:
        """Sends what was offered."""
        assert self._offered is not None, "rows are offered before they are sent"
        (rows, mark), self._offered, self._sizes = self._offered, None, sizes
        with self._beside.after(mark):
            self._flight = self._carrier.start(rows, sizes, keeps=keeps)

    def start_back(self, gradient: Tensor) -> None:
        """Sends the gradient of what came."""
        assert self._sizes is not None, "a gradient of rows that never came"
        self.offer(gradient)
        self.start(self._sizes.back, keeps=False)  # the next transfer is made of what comes of it

    def land(self) -> Tensor:
        """What came."""
        assert self._flight is not None, "nothing is under way"
        flight, self._flight = self._flight, None
        return flight.land()


class _Begun(torch.autograd.Function):
    """Offers rows, and returns an empty tensor that stands for them until they arrive; backward it waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, moving: _Moving) -> Tensor:
        ctx.moving = moving
        moving.offer(rows.detach())
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.moving.land(), None


class _Arrived(torch.autograd.Function):
    """What came for the empty tensor of `_Begun`; backward it starts to send the gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, moving: _Moving) -> Tensor:
        ctx.moving = moving
        return moving.land()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.moving.start_back(gradient)
        return gradient.new_empty(0), None


def _done(transfer: Transfer | None) -> None:
    if transfer is not None:
        transfer.wait()
