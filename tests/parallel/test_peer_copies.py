"""Copies into other ranks' memory: what arrives, and that no room is written before its reader has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.parallel import peer_copies
from hone.parallel.experts import Sizes
from hone.parallel.overlap import gathered_linear, scattered_linear
from hone.parallel.peer_copies import GATHER, SUM, PeerCopies
from hone.parallel.row_copies import RowCopies

PATIENCE_S = 60


class Shared:
    """What threads write of each other, as GPUs do: rooms and numbers, and how many calls each has ended."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.rooms: dict[tuple[int, int, int], Tensor] = {}
        self.numbers = {(owner, kind, source): 0 for owner in range(size) for kind in (0, 1) for source in range(size)}
        self.ended = {(owner, kind): 0 for owner in range(size) for kind in (0, 1)}
        self.barrier = threading.Barrier(size)


class ThreadMemory:
    """`Memory` of a thread, whose copies another one makes."""

    def __init__(self, shared: Shared, index: int, size: int) -> None:
        self.shared, self.index, self.size, self.capacity = shared, index, size, 0
        self.engine = ThreadPoolExecutor(1)
        self.last: Future[None] = self.engine.submit(lambda: None)

    def reserve(self, num_bytes: int) -> bool:
        if num_bytes <= self.capacity:
            return False
        self.last.result(PATIENCE_S)
        self.shared.barrier.wait(PATIENCE_S)
        self.capacity = num_bytes
        for kind in (GATHER, SUM):
            self.shared.ended[self.index, kind] = 0
            for other in range(self.size):
                self.shared.numbers[self.index, kind, other] = 0
            for turn in (0, 1):
                self.shared.rooms[self.index, kind, turn] = torch.zeros(self.size * num_bytes, dtype=torch.uint8)
        self.shared.barrier.wait(PATIENCE_S)
        return True

    def _room(self, owner: int, kind: int, turn: int, num_bytes: int) -> Tensor:
        return self.shared.rooms[owner, kind, turn][: self.size * num_bytes].view(self.size, num_bytes)

    def room(self, kind: int, turn: int, num_bytes: int) -> Tensor:
        return self._room(self.index, kind, turn, num_bytes)

    def copy(self, rank: int, kind: int, turn: int, part: Tensor, number: int | None, place: int = 0) -> None:
        def work() -> None:
            if number is not None:
                assert self.shared.ended[rank, kind] >= number - 2, "the room is still read"
            self._room(rank, kind, turn, place or len(part))[self.index, : len(part)].copy_(part)
            if number is not None:
                with self.shared.changed:
                    self.shared.numbers[rank, kind, self.index] = number
                    self.shared.changed.notify_all()

        self.last = self.engine.submit(work)

    def wait(self, rank: int, kind: int, number: int) -> None:
        place = self.index, kind, rank
        with self.shared.changed:
            assert self.shared.changed.wait_for(lambda: self.shared.numbers[place] >= number, PATIENCE_S)

    def mark(self) -> Callable[[], None]:
        last = self.last
        return lambda: last.result(PATIENCE_S)

    def release(self) -> None:
        own = [(self.index, kind, other) for kind in (GATHER, SUM) for other in range(self.size)]
        theirs = [(other, kind, self.index) for _, kind, other in own]
        self._later(own)
        self.last = self.engine.submit(self._later, theirs)

    def _later(self, places: list[tuple[int, int, int]]) -> None:
        with self.shared.changed:
            self.shared.numbers.update(dict.fromkeys(places, 1 << 30))
            self.shared.changed.notify_all()


def on_threads(size: int, work: Callable[[PeerCopies, Callable[[int], None]], None]) -> None:
    """`work` of every rank; its second argument tells that a call of a kind was used to its end."""
    shared = Shared(size)

    def run(index: int) -> None:
        memory = ThreadMemory(shared, index, size)

        def end(kind: int) -> None:
            shared.ended[index, kind] += 1

        try:
            work(PeerCopies(index, size, memory), end)
            memory.last.result(PATIENCE_S)
        finally:
            memory.engine.shutdown()

    with ThreadPoolExecutor(size) as threads:
        for one in [threads.submit(run, index) for index in range(size)]:
            one.result(PATIENCE_S)


def values(rank: int, call: int, rows: int) -> Tensor:
    return torch.arange(rows * 3, dtype=torch.float32).view(1, rows, 3) + 100 * rank + 1000 * call


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_comes_is_what_the_others_sent_in_every_call(size):
    def work(exchange: PeerCopies, end: Callable[[int], None]) -> None:
        me = exchange.index
        for call in range(30):
            rows = 7 if call > 10 else 5  # from here on it needs more room
            mine = values(me, call, rows)
            every = exchange.gather(mine, whole=call % 2 == 0)
            found = dict(every.parts())
            assert list(found) == [(me - step) % size for step in range(size)]
            assert all(torch.equal(part, values(rank, call, rows)) for rank, part in found.items())
            whole = every.whole() if call % 2 == 0 else None
            assert whole is None or torch.equal(whole, torch.stack([values(one, call, rows) for one in range(size)]))
            end(GATHER)
            # A gathering and a sum at once, as in the backward pass of a linear.
            every = exchange.gather(mine, whole=True)
            total = exchange.sum(lambda rank, rows=rows, call=call: values(me, call + 7 * rank, rows))
            assert torch.equal(every.whole(), torch.stack([values(one, call, rows) for one in range(size)]))
            end(GATHER)
            wanted = sum(values(one, call + 7 * me, rows) for one in range(size))
            assert torch.equal(total.total(), wanted)
            end(SUM)

    on_threads(size, work)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_pieces_of_rows_come_from_every_rank(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    calls = torch.randint(0, 5, (30, size, size), generator=draw)  # rows of each rank for each one
    calls[3] = 0
    calls[20:] += 9  # from here on they need more room

    def rows_of(source: int, to: int, call: int) -> Tensor:
        return torch.full((int(calls[call, source, to]), 3), 100.0 * call + 10 * source + to)

    def work(exchange: PeerCopies, end: Callable[[int], None]) -> None:
        me, carrier = exchange.index, RowCopies(exchange.index, size, exchange._memory)
        for call, counts in enumerate(calls.tolist()):
            sizes = Sizes(counts[me], [one[me] for one in counts], max(map(sum, counts)))
            sent = torch.cat([rows_of(me, rank, call) for rank in range(size)])
            found = carrier.start(sent, sizes).land()
            assert torch.equal(found, torch.cat([rows_of(rank, me, call) for rank in range(size)])), call
            end(GATHER)

    on_threads(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_nobody_keeps_are_used_where_they_came(size: int) -> None:
    """In pieces as large as their rooms: each call's rows are read before the next one begins; every third call's are kept."""

    def rows_of(source: int, to: int, call: int) -> Tensor:
        return torch.full((4, 3), 100.0 * call + 10 * source + to)

    def work(exchange: PeerCopies, end: Callable[[int], None]) -> None:
        me, carrier = exchange.index, RowCopies(exchange.index, size, exchange._memory)
        sizes, kept = Sizes([4] * size, [4] * size, 4), []
        for call in range(12):
            sent = torch.cat([rows_of(me, rank, call) for rank in range(size)])
            wanted = torch.cat([rows_of(rank, me, call) for rank in range(size)])
            found = carrier.start(sent, sizes, keeps=call % 3 == 0).land()
            assert torch.equal(found, wanted), call
            room = exchange._memory.room(0, (call + 1) % 2, 4 * 3 * 4)
            assert (found.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()) == (call % 3 > 0)
            if call % 3 == 0:
                kept.append((found, wanted))
            end(GATHER)
        assert all(torch.equal(found, wanted) for found, wanted in kept)

    on_threads(size, work)


@pytest.mark.parametrize("biased", [False, True])
def test_linears_have_the_results_and_gradients_of_one_process(biased):
    size, width, inner, tokens = 2, 12, 8, 6
    draw = torch.Generator().manual_seed(0)
    x, up, down, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((1, size * tokens, width), (size * inner, width), (width, size * inner), (size * inner,))
    )
    alone = [one.clone().requires_grad_() for one in (x, up, down, bias)]
    wanted = torch.tanh(torch.nn.functional.linear(alone[0], alone[1], alone[3] if biased else None)) @ alone[2].T
    (wanted**2).sum().backward()

    def work(exchange: PeerCopies, end: Callable[[int], None]) -> None:
        rows, columns = (slice(exchange.index * size_of, (exchange.index + 1) * size_of) for size_of in (tokens, inner))
        mine, first, second, added = (
            one.clone().requires_grad_() for one in (x[:, rows], up[columns], down[:, columns], bias[columns])
        )
        for _ in range(2):
            for one in (mine, first, second, added):
                one.grad = None
            inside = torch.tanh(gathered_linear(mine, first, added if biased else None, exchange))
            end(GATHER)
            y = scattered_linear(inside, second, None, exchange)
            end(SUM)
            torch.testing.assert_close(y, wanted[:, rows])
            # Two gatherings and a sum of the backward pass have ended when the next call of a kind writes into their rooms.
            ends = iterated(end)
            inside.register_hook(lambda _, ends=ends: next(ends))
            (y**2).sum().backward()
            next(ends)
            torch.testing.assert_close(mine.grad, alone[0].grad[:, rows])
            torch.testing.assert_close(first.grad, alone[1].grad[columns])
            torch.testing.assert_close(second.grad, alone[2].grad[:, columns])
            assert not biased or torch.allclose(added.grad, alone[3].grad[columns])

    def iterated(end: Callable[[int], None]) -> Iterator[None]:
        yield end(GATHER)
        end(GATHER)
        yield end(SUM)

    on_threads(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_do_not_wait_for_one_that_has_failed(size):
    begun = threading.Barrier(size)

    def work(exchange: PeerCopies, end: Callable[[int], None]) -> None:
        me = exchange.index
        assert len(dict(exchange.gather(values(me, 0, 5)).parts())) == size
        end(GATHER)
        if me == 0:  # fails before its next call
            begun.wait(PATIENCE_S)
            exchange.close(broken=True)
            return
        every = exchange.gather(values(me, 1, 5))
        begun.wait(PATIENCE_S)
        found = dict(every.parts())  # ends; of rank 0 whatever lies there
        assert list(found) == [(me - step) % size for step in range(size)]
        assert all(torch.equal(found[rank], values(rank, 1, 5)) for rank in range(1, size))

    on_threads(size, work)


def test_a_rank_that_is_told_of_an_error_ends_its_own_waits():
    def work(exchange: PeerCopies, end: Callable[[int], None]) -> None:
        if exchange.index == 0:  # is gone
            exchange._memory.reserve(values(0, 0, 5).nbytes)
            return
        every = exchange.gather(values(1, 0, 5))
        exchange.close(broken=True)
        assert list(dict(every.parts())) == [1, 0]

    on_threads(2, work)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_gpu_ends_its_own_waits_and_those_for_it_alone(index, monkeypatch):
    """Where `GpuMemory.release` writes, with the driver's writes made at once on a CPU's memory."""
    size, capacity, last = 3, 256, 7
    memory = peer_copies.GpuMemory.__new__(peer_copies.GpuMemory)
    memory.__dict__ |= {"_index": index, "_size": size, "_capacity": capacity, "_last": last, "_every": [], "_kinds": 2}
    memory.__dict__ |= {"_stream": "copies", "_free": "free", "_number": torch.zeros(1, dtype=torch.int32)}
    written: list[Any] = []

    def write(what: str, stream: Any, at: Tensor, value: int) -> None:
        assert what == "Write"
        written.append(stream)
        at.fill_(value)

    monkeypatch.setattr(peer_copies, "_stream_value", write)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    memory.release()
    assert not written, "no room was made, so that nobody waits"
    each = torch.zeros(size, memory._flags_at + 2 * size * 4, dtype=torch.uint8)
    memory._every = list(each)
    memory.release()
    rooms, flags = (
        each[:, : memory._flags_at],
        each[:, memory._flags_at :].contiguous().view(torch.int32).view(size, 2, size),
    )
    assert not rooms.any()
    for owner in range(size):
        for source in range(size):
            ends = owner != source and index in (owner, source)
            assert (flags[owner, :, source] == (last + peer_copies._LATER if ends else 0)).all(), (owner, source)
    assert written == ["free"] * 4 + ["copies"], "its own waits end at once, the others' after its copies"
    # As the driver compares: by the sign of the difference in 32 bits, with any number that is in use.
    assert all(0 < last + peer_copies._LATER - number < 2**31 for number in range(last + 3))

    def failing(*_: Any) -> None:
        raise AssertionError("cuStreamWriteValue32 returned 700")

    monkeypatch.setattr(peer_copies, "_stream_value", failing)
    memory.release()  # the error of the GPU is shown by what failed first


def test_a_call_must_be_used_before_the_next_one_of_its_kind():
    memory = ThreadMemory(Shared(1), 0, 1)
    exchange = PeerCopies(0, 1, memory)
    every = exchange.gather(values(0, 0, 5), whole=True)
    with pytest.raises(AssertionError, match="used to its end"):
        exchange.gather(values(0, 0, 5))
    every.whole()
    assert next(exchange.gather(values(0, 1, 5)).parts())[0] == 0
    memory.engine.shutdown()
