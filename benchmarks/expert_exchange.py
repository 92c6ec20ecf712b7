"""Rows of experts between ranks and back: checked against what every rank computes by itself, then timed, by both backends.

    python -m benchmarks.expert_exchange --ranks 2                          # GPUs: collectives of NCCL, copy engines
    python -m benchmarks.expert_exchange --ranks 2 --device cpu --check     # gloo, results and gradients alone

One expert multiplies its rows by a number of its own. Rows say GB/s that a rank sends, there and back, of T tokens of D numbers in bfloat16
that visit k of E experts, with the counts of rows; `of_limit` is the share of the rate of a copy from one GPU to the other,
measured in the same run. Sizes are exact, for which the host waits, or rows are in rooms of a fixed size, for which it does not
(`hone.parallel.piece_bound`). `transfers` are those of the rows alone, without counts. On GPUs seconds are those of the GPU for
some exchanges one after the other, which the host has given to it before it begins, as in a training whose host is ahead; `host_seconds`
are what it takes the host to give one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels.timing import CLOCK_HZ
from benchmarks.ranks import on_ranks
from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.ops import permute
from hone.parallel.degrees import Degrees
from hone.parallel.experts import RowExchange, Sizes
from hone.parallel.grid import Grid

CASES = [
    (300, 64, 8, 2, 0.0),
    (4096, 2048, 64, 6, 0.0),
    (16384, 2048, 64, 6, 0.0),
    (4096, 2048, 64, 6, 2.0),
    (513, 64, 8, 1, 50.0),
]
"""Tokens, width, experts, visits a token, and what is added to the scores of the first rank's experts; with 50 the others have no rows."""
ROUNDS, SPELL = 8, 6
"""Times that are measured, and exchanges of each."""


def main() -> None:
    """Starts the ranks; under torchrun does one rank's part."""
    on_ranks("expert_exchange", _arguments(), _work)


def _work(arguments: argparse.Namespace) -> None:
    mesh = Mesh.from_environment()
    device = mesh.place(arguments.device)
    rows: list[dict[str, Any]] = []
    with mesh.together():
        grid = Grid(mesh, Degrees(ep=mesh.world_size), device)
        link = _link_rate(mesh, grid) if device.startswith("cuda") and not arguments.check else None
        for backend in ("standard", "peer_copies"):
            try:
                exchange = grid.expert_exchange(backend)
            except HoneError as error:
                if mesh.leads:
                    print(f"{backend}: left out, {error}", flush=True)
                continue
            for case in CASES if device.startswith("cuda") else CASES[:1] + CASES[-1:]:
                for way in ("exact sizes", "rooms"):
                    _check(exchange, mesh, device, way, *case)
                    if not arguments.check:
                        rows.append(_timed(exchange, grid, mesh, device, f"{backend}, {way}", link, *case))
                if not arguments.check:
                    rows.append(_timed(exchange, grid, mesh, device, f"{backend}, transfers", link, *case))
    if mesh.leads and link is not None:
        _table(rows, link)
    if mesh.leads:
        print("results and gradients are right", flush=True)
        arguments.out.write_text(json.dumps([row for row in rows if row]))


def _drawn(
    mesh: Mesh, device: str, tokens: int, width: int, experts: int, k: int, skew: float
) -> tuple[Tensor, Tensor]:
    """A rank's tokens [T, D] and the experts [T, k] that they visit."""
    draw = torch.Generator(device).manual_seed(7 + mesh.rank)
    x = torch.randn(tokens, width, device=device, generator=draw).bfloat16()
    scores = torch.randn(tokens, experts, device=device, generator=draw)
    scores[:, : experts // mesh.world_size] += skew
    return x, scores.topk(k).indices


def _check(exchange: RowExchange, mesh: Mesh, device: str, way: str, *case: Any) -> None:
    """Several turns, since rooms are used in turn: results to the bit, gradients to bfloat16's rounding."""
    experts, k = case[2:4]
    x, ids = _drawn(mesh, device, *case)
    own = experts // mesh.world_size
    numbers = torch.arange(1, experts + 1, device=device) / 8
    order = ids.flatten().sort(stable=True)
    exchange.bound.rows = None
    for turn in range(6):
        given = x.clone().requires_grad_()
        sent, place = _dispatched(exchange, given, ids, experts, roomy=way == "rooms")
        assert (sent._room is None) == (turn == 0 or way != "rooms")
        came, own_ends, starts = sent.arrived(in_pieces=way == "rooms")
        if starts is None:
            own_ends, starts = own_ends[:, None], own_ends.roll(1)[:, None]
            starts[0] = 0
        mine = torch.zeros(len(came), device=device)
        for number, *spans in zip(numbers[mesh.rank * own :][:own], starts.tolist(), own_ends.tolist(), strict=True):
            for begin, end in zip(*spans, strict=True):
                mine[begin:end] = number
        back = exchange.combine((came.float() * mine[:, None]).to(came.dtype), sent).arrived()
        assert not exchange.bound.settle(), "a room was too small"
        exchange.bound.close()
        back = back[place.flatten().long()][order.indices]
        wanted = (x[order.indices // k].float() * numbers[order.values][:, None]).to(x.dtype)
        assert torch.equal(back, wanted), "rows came back changed"
        back.float().square().sum().backward()
        flow = (2 * wanted.float()).bfloat16().float() * numbers[order.values][:, None]
        gradient = torch.zeros(x.shape, device=device).index_add_(0, order.indices // k, flow.bfloat16().float())
        assert given.grad is not None
        gap = (given.grad.float() - gradient).abs().max() / gradient.abs().max()
        assert gap < 0.02, f"a gradient is {gap:.3g} of the largest one off"


def _dispatched(exchange: RowExchange, x: Tensor, ids: Tensor, experts: int, *, roomy: bool) -> tuple[Any, Tensor]:
    """Rows of `x` on their way, and where each visit's row lies; `roomy`: in rooms, where their size is known."""
    if roomy:
        exchange.bound.begin()
    pieces = exchange.pieces
    rows, ends, place = permute(x, ids, experts, pieces=pieces)
    return exchange.dispatch(rows, ends, None if pieces is None else pieces[1]), place


def _timed(
    exchange: RowExchange, grid: Grid, mesh: Mesh, device: str, what: str, link: float | None, *case: Any
) -> dict[str, Any]:
    tokens, width, experts, k, skew = case
    x, ids = _drawn(mesh, device, *case)
    own = experts // mesh.world_size
    exchange.bound.rows = None
    with torch.no_grad():
        _dispatched(exchange, x, ids, experts, roomy=True)[0].arrived(in_pieces=True)
        exchange.bound.settle()  # from here on the room is known
        exchange.bound.close()
    counts = [int((ids.flatten() // own == rank).sum()) for rank in range(mesh.world_size)]
    every = mesh.gather(counts)
    sizes = Sizes(counts, [one[mesh.rank] for one in every], max(map(sum, every)))
    if what.endswith("rooms"):
        exchange.bound.begin()
    rows, ends, _ = permute(x, ids, experts, pieces=exchange.pieces)
    room = exchange.bound.room

    def there_and_back() -> None:
        if what.endswith("transfers"):
            exchange.carrier.start(exchange.carrier.start(rows, sizes).land(), sizes.back).land()
            return
        sent = exchange.dispatch(rows, ends, room)
        exchange.combine(sent.arrived(in_pieces=True).rows, sent).arrived()

    with torch.no_grad():
        seconds, host_seconds = (max(mesh.gather(one)) for one in _seconds(there_and_back, grid, device))
    exchange.bound.close()
    leaving = len(ids.flatten()) - counts[mesh.rank]
    rate = 2 * max(mesh.gather(leaving)) * width * x.element_size() / seconds
    if mesh.leads:
        print(f"{what}: {case}: {seconds * 1e3:.3f} ms, {rate / 1e9:.1f} GB/s", flush=True)
    skewed = ", most of them to one rank" if skew else ""
    row = {
        "figure": f"rows of experts there and back, {tokens} x {width}, {k} of {experts}{skewed}, {mesh.world_size} ranks: {what}",
        "value": rate / 1e9, "unit": "GB/s", "n": ROUNDS, "seconds": seconds, "host_seconds": host_seconds,
    }  # fmt: skip
    return row if link is None else {**row, "of_limit": rate / link}


def _table(rows: list[dict[str, Any]], link: float) -> None:
    """Prints the rates beside the link's."""
    print(f"\na copy to the next GPU while it copies to this one: {link / 1e9:.1f} GB/s", flush=True)
    print(f"{'ms':>8} {'host ms':>8} {'GB/s':>7} {'of link':>8}  rows of experts there and back", flush=True)
    for row in rows:
        said = row["figure"].removeprefix("rows of experts there and back, ")
        print(
            f"{row['seconds'] * 1e3:>8.3f} {row['host_seconds'] * 1e3:>8.3f} {row['value']:>7.1f} {row['of_limit']:>8.1%}  {said}",
            flush=True,
        )


def _link_rate(mesh: Mesh, grid: Grid) -> float | None:
    """Bytes/s of a copy of 256 MiB to the next GPU while it copies to this one; None where they do not reach each other's memory."""
    here, there = torch.cuda.current_device(), (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    if here == there or not torch.cuda.can_device_access_peer(here, there):
        return None
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device=f"cuda:{one}") for one in (here, there))
    return (1 << 28) / max(mesh.gather(_seconds(lambda: target.copy_(source), grid, f"cuda:{here}")[0]))


def _seconds(work: Callable[[], Any], grid: Grid, device: str) -> tuple[float, float]:
    """(median seconds of `work`, seconds in which the host gives it to the GPU); on a CPU twice the same."""
    times, host = [], 0.0
    for turn in range(ROUNDS + 1):
        dist.barrier(group=grid.ep.group)
        if not device.startswith("cuda"):
            begun = time.perf_counter()
            for _ in range(SPELL):
                work()
            times.append(time.perf_counter() - begun)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1.5 * host * CLOCK_HZ))
        begin.record()
        begun = time.perf_counter()
        for _ in range(SPELL):
            work()
        host = host if turn > 1 else time.perf_counter() - begun  # the first time kernels are compiled
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    seconds = statistics.median(times[1:]) / SPELL
    return seconds, host / SPELL or seconds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true", help="results and gradients alone")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
