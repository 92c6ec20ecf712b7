"""Products whose tokens ranks share, a rank's tokens at a time: while one part is multiplied, others are on their way.

The sequence-parallel regions of `hone.parallel.regions` with the product beside them: Wang et al. 2023 (ASPLOS, "Overlap
Communication with Dependent Computation via Decomposition"); torch calls it async tensor parallelism. Between GPUs of one host the
copy engines carry the parts (`hone.parallel.peer_copies`), between CPUs gloo does. The gathered input of a product is not kept: its
parts travel again beside the products of the backward pass (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
Legend: B sequences, S tokens, D and N features, n ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.parallel.axis import Axis, Transfer


class Gathering(Protocol):
    """Every rank's part on its way to this rank."""

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """(rank, its part) when it is there, this rank's first; valid until `whole` returns or the iteration ends."""

    def whole(self) -> Tensor:
        """All parts in the order of the ranks [n, *part.shape], valid until the next but one gathering begins."""


class Summing(Protocol):
    """Every rank's contribution to this rank's part on its way to this rank."""

    def total(self) -> Tensor:
        """Their sum: this rank's, then those of the ranks before it, nearest first."""


class Exchange(Protocol):
    """The transfers of the ranks of an axis, of which this is number `index` of `size`.

    Every rank calls the same methods in the same order, with contiguous tensors of one shape and dtype. At most one gathering and
    one sum may be under way, and each must be used to its end.
    """

    index: int
    size: int

    def gather(self, part: Tensor, *, whole: bool = False) -> Gathering:
        """Starts to bring every rank's `part` to all; `whole`: they will be asked for together."""

    def sum(self, make: Callable[[int], Tensor]) -> Summing:
        """Calls `make(rank)` for every rank, this one last, and starts to send each rank its result."""

    def close(self, broken: bool) -> None:
        """The end of all calls; `broken`: a rank has failed, so that what others or this one wait for may never come."""


def exchange_of(axis: Axis, device: torch.device | str) -> Exchange:
    """The transfers of tensors on `device` along `axis`; every rank of it calls this. Raises SpecError where GPUs cannot reach each other."""
    if torch.device(device).type != "cuda":
        return Messages(axis)
    from hone.parallel.peer_copies import PeerCopies, gpu_memory

    return PeerCopies(axis.index, axis.size, gpu_memory(axis, torch.device(device)))


class Messages:
    """`Exchange` by the collectives of the process group."""

    def __init__(self, axis: Axis) -> None:
        self._axis, self.index, self.size = axis, axis.index, axis.size

    def gather(self, part: Tensor, *, whole: bool = False) -> Gathering:
        """As `Exchange.gather`."""
        every = part.new_empty(self.size, *part.shape)
        return _Gathered(self.index, part, every, self._axis.all_gather(every.view(-1), part.view(-1)))

    def sum(self, make: Callable[[int], Tensor]) -> Summing:
        """As `Exchange.sum`."""
        sent: Tensor | None = None
        for step in range(1, self.size):
            rank = (self.index + step) % self.size
            made = make(rank)
            sent = made.new_empty(self.size, *made.shape) if sent is None else sent
            sent[rank] = made
        assert sent is not None, "an exchange has several ranks"
        sent[self.index].zero_()
        arrived = torch.empty_like(sent)
        transfer = self._axis.all_to_all(arrived.view(self.size, -1), sent.view(self.size, -1))
        return _Summed(self.index, make(self.index), arrived, transfer)

    def close(self, broken: bool) -> None:
        """As `Exchange.close`: the process group ends its waits itself."""


class _Gathered:
    def __init__(self, index: int, part: Tensor, every: Tensor, transfer: Transfer | None) -> None:
        self._index, self._part, self._every, self._transfer = index, part, every, transfer

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        yield self._index, self._part
        every = self.whole()
        for step in range(1, len(every)):
            rank = (self._index - step) % len(every)
            yield rank, every[rank]

    def whole(self) -> Tensor:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        return self._every


class _Summed:
    def __init__(self, index: int, own: Tensor, arrived: Tensor, transfer: Transfer | None) -> None:
        self._index, self._own, self._arrived, self._transfer = index, own, arrived, transfer

    def total(self) -> Tensor:
        if self._transfer is not None:
            self._transfer.wait()
        found = self._own
        for step in range(1, len(self._arrived)):
            found = found + self._arrived[(self._index - step) % len(self._arrived)]
        return found


@torch.compiler.disable
def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
    """`regions.gathered(x) @ weight.T + bias`: every rank's tokens x [B, S / n, D] times weight [N, D]: [B, S, N]."""
    return _GatheredLinear.apply(x.contiguous(), weight, bias, exchange)  # type: ignore[no-any-return]


@torch.compiler.disable
def scattered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
    """`regions.scattered(x @ weight.T + bias)`: this rank's tokens [B, S / n, N] of the sum of every rank's product of x [B, S, D]."""
    return _ScatteredLinear.apply(x, weight, bias, exchange)  # type: ignore[no-any-return]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor) -> None:
    """x [B, S, D] @ weight [N, D].T + bias, written `into` [B, S, N] without a copy."""
    x, into = x.flatten(0, 1), into.view(-1, into.shape[-1])
    torch.mm(x, weight.T, out=into) if bias is None else torch.addmm(bias, x, weight.T, out=into)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
        y = x.new_empty(exchange.size, *x.shape[:2], len(weight))
        for rank, tokens in exchange.gather(x).parts():
            _product(tokens, weight, bias, y[rank])
        ctx.exchange, ctx.biased = exchange, bias is not None
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return y.view(x.shape[0], -1, len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        parts, of_x, every = _parts(gradient, ctx.exchange), None, None
        if x is not None and ctx.needs_input_grad[1]:
            every = ctx.exchange.gather(x, whole=True)
        if ctx.needs_input_grad[0]:
            of_x = ctx.exchange.sum(lambda rank: parts[rank] @ weight)
        # The product for the weight hides what is still on its way.
        of_weight = _of_weight(ctx, gradient, None if every is None else every.whole())
        return None if of_x is None else of_x.total(), *of_weight, None


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.biased = exchange, bias is not None
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        parts = _parts(x, exchange)
        return exchange.sum(lambda rank: F.linear(parts[rank], weight, bias)).total()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        size, gradient = ctx.exchange.size, gradient.contiguous()
        of_x = gradient.new_empty(size, *gradient.shape[:2], weight.shape[1])
        every = ctx.exchange.gather(gradient, whole=True)
        for rank, part in every.parts():
            _product(part, weight.T, None, of_x[rank])
        return of_x.view(gradient.shape[0], -1, weight.shape[1]), *_of_weight(ctx, every.whole(), x), None


def _parts(x: Tensor, exchange: Exchange) -> Tensor:
    """x [B, S, D] by the rank whose tokens they are: [n, B, S / n, D]."""
    return x.reshape(exchange.size, x.shape[0], -1, x.shape[2])


def _of_weight(ctx: Any, gradient: Tensor, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, of the output's `gradient` and the input of all tokens."""
    flat = gradient.flatten(0, -2)
    of_weight = flat.T @ x.flatten(0, -2) if x is not None and ctx.needs_input_grad[1] else None
    return of_weight, flat.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
