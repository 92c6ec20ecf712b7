"""Timing on a GPU: medians over replays of a captured graph, hone and peer in turn, and the ceilings to divide by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CLOCK_HZ = 2e9
"""Cycles per second that no H200 exceeds: a sleep of so many is at least a second."""


@dataclass(frozen=True)
class Ceilings:
    """Ceilings measured in this run: bytes/s of a copy (read and written both count) and of a read, FLOP/s of a bf16 GEMM."""

    copy: float
    read: float
    gemm: float


def ceilings() -> Ceilings:
    """Measured on 4 GiB and on an 8192^3 product, both of random numbers."""
    copy, read = _memory_rates()
    torch.cuda.empty_cache()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = 2 * 8192**3 / median_seconds(lambda: a @ b, captured=False)
    return Ceilings(copy, read, gemm)


def _memory_rates() -> tuple[float, float]:
    x = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    copy = 4 * x.numel() / median_seconds(lambda: y.copy_(x), captured=False)
    read = 2 * x.numel() / median_seconds(lambda: x.view(-1, 4096).sum(1), captured=False)
    return copy, read


def median_seconds(run: Callable[[], Any], *, captured: bool = True, min_time_s: float = 0.15, calls: int = 1) -> float:
    """Median seconds of `run` / `calls`, after warming up; as replays of a CUDA graph unless `captured` is False.

    Without a graph the GPU is kept busy while `run` is launched, so that its time alone is measured either way, as long
    as `run` itself does not wait for the GPU.
    A `run` whose data fits in L2 must itself go through several sets of inputs and say in `calls` how many it did.
    """
    return interleaved([run], captured=captured, min_time_s=min_time_s, calls=calls)[0]


def interleaved(
    runs: Sequence[Callable[[], Any]], *, captured: bool = True, min_time_s: float = 0.15, calls: int = 1
) -> list[float]:
    """Median seconds per call of each of `runs`, timed in turn so that temperature and clocks affect all equally."""
    replays = [_captured(run) if captured else _warmed(run) for run in runs]
    once = max(_event_seconds(replay) for replay in replays)
    lead = 0.0 if captured else 1.5 * max(_launch_seconds(replay) for replay in replays)
    rounds = max(5, min(200, int(min_time_s / max(once + lead, 1e-6))))
    # A replay far shorter than an event's resolution is repeated between two events.
    repeats = max(1, int(100e-6 / max(once, 1e-7)))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for replay, taken in zip(replays, times, strict=True):
            taken.append(_event_seconds(replay, repeats, lead * repeats))
    return [statistics.median(taken) / calls for taken in times]


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        # The generator still waits for the capture's end, and would refuse every later random number.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _warmed(run: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    return run


def _launch_seconds(run: Callable[[], Any]) -> float:
    """CPU seconds to launch a call on an idle GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken


def _event_seconds(run: Callable[[], Any], repeats: int = 1, lead: float = 0.0) -> float:
    """GPU seconds of a call; the GPU idles for `lead` seconds before, while the calls are launched."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if lead:
        torch.cuda._sleep(int(lead * CLOCK_HZ))  # torch's own tests of streams hold a GPU up by this
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def row(
    figure: str,
    seconds: float,
    *,
    amount: float,
    unit: str,
    ceiling: float,
    peer: str = "",
    peer_seconds: float | None = None,
    target: float | None = None,
    of_target: float | None = None,
) -> dict[str, Any]:
    """A ledger row: `amount` (FLOP or bytes) per second in `unit` (TFLOP/s or TB/s), against the peer and the ceiling.

    `ratio` is peer_seconds / seconds. `target` is the least ratio, `of_target` the least fraction of the ceiling, that
    the figure is meant to reach.
    """
    made: dict[str, Any] = {
        "figure": figure,
        "value": amount / seconds / 1e12,
        "unit": unit,
        "seconds": seconds,
        "of_limit": amount / seconds / ceiling,
    }
    if peer_seconds is not None:
        made |= {"peer": peer, "peer_value": amount / peer_seconds / 1e12, "ratio": peer_seconds / seconds}
    if target is not None:
        made["target"] = target
    if of_target is not None:
        made["of_target"] = of_target
    return made
