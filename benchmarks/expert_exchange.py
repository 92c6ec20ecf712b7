"""Rows of experts between ranks and back: checked against what every rank computes by itself, then timed, by both backends.

    python -m benchmarks.expert_exchange --ranks 2                          # GPUs: collectives of NCCL, copy engines
    python -m benchmarks.expert_exchange --ranks 2 --device cpu --check     # gloo, results and gradients alone

One expert multiplies its rows by a number of its own. Rows say GB/s that a rank sends, there and back, of T tokens of D numbers in bfloat16
that visit k of E experts; `of_limit` is the share of the rate of a copy from one GPU to the other, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import on_ranks
from hone.base.errors import HoneError
from hone.base.ranks import Mesh
from hone.ops import permute
from hone.parallel.degrees import Degrees
from hone.parallel.experts import ExpertExchange
from hone.parallel.grid import Grid

CASES = [(300, 64, 8, 2, 0.0), (4096, 2048, 64, 6, 0.0), (4096, 2048, 64, 6, 2.0), (513, 64, 8, 1, 50.0)]
"""Tokens, width, experts, visits a token, and what is added to the scores of the first rank's experts; with 50 the others have no rows."""
ROUNDS = 12


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
            for case in CASES if device.startswith("cuda") else CASES[:1] + CASES[3:]:
                _check(exchange, grid, mesh, device, *case)
                if not arguments.check:
                    rows.append(_timed(exchange, grid, mesh, device, backend, link, *case))
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


def _check(exchange: ExpertExchange, grid: Grid, mesh: Mesh, device: str, *case: Any) -> None:
    """Several turns, since rooms are used in turn: results to the bit, gradients to bfloat16's rounding."""
    experts, k = case[2:4]
    x, ids = _drawn(mesh, device, *case)
    own = experts // mesh.world_size
    numbers = torch.arange(1, experts + 1, device=device) / 8
    order = ids.flatten().sort(stable=True)
    for _ in range(6):
        given = x.clone().requires_grad_()
        rows, ends, _ = permute(given, ids, experts)
        sent = exchange.dispatch(rows, ends)
        came, own_ends = sent.arrived()
        counts = own_ends.diff(prepend=own_ends.new_zeros(1)).long()
        mine = numbers[mesh.rank * own : (mesh.rank + 1) * own].repeat_interleave(counts, output_size=len(came))
        back = exchange.combine((came.float() * mine[:, None]).to(came.dtype), sent).arrived()
        wanted = (rows.detach().float() * numbers[order.values][:, None]).to(rows.dtype)
        assert torch.equal(back, wanted), "rows came back changed"
        back.float().square().sum().backward()
        flow = (2 * wanted.float()).bfloat16().float() * numbers[order.values][:, None]
        gradient = torch.zeros(x.shape, device=device).index_add_(0, order.indices // k, flow.bfloat16().float())
        assert given.grad is not None
        gap = (given.grad.float() - gradient).abs().max() / gradient.abs().max()
        assert gap < 0.02, f"a gradient is {gap:.3g} of the largest one off"


def _timed(
    exchange: ExpertExchange, grid: Grid, mesh: Mesh, device: str, backend: str, link: float | None, *case: Any
) -> dict[str, Any]:
    tokens, width, experts, k, skew = case
    x, ids = _drawn(mesh, device, *case)
    rows, ends, _ = permute(x, ids, experts)
    times = []
    for _ in range(ROUNDS):
        dist.barrier(group=grid.ep.group)
        _wait(device)
        begun = time.perf_counter()
        with torch.no_grad():
            sent = exchange.dispatch(rows, ends)
            came, _ = sent.arrived()
            exchange.combine(came, sent).arrived()
        _wait(device)
        times.append(time.perf_counter() - begun)
    seconds = max(mesh.gather(statistics.median(times)))
    own = experts // mesh.world_size
    leaving = int((ids.flatten() // own != mesh.rank).sum())
    rate = 2 * max(mesh.gather(leaving)) * width * x.element_size() / seconds
    if mesh.leads:
        print(f"{backend}: {case}: {seconds * 1e3:.3f} ms, {rate / 1e9:.1f} GB/s", flush=True)
    skewed = ", most of them to one rank" if skew else ""
    row = {
        "figure": f"rows of experts there and back, {tokens} x {width}, {k} of {experts}{skewed}, {mesh.world_size} ranks: {backend}",
        "value": rate / 1e9, "unit": "GB/s", "n": ROUNDS, "seconds": seconds,
    }  # fmt: skip
    return row if link is None else {**row, "of_limit": rate / link}


def _link_rate(mesh: Mesh, grid: Grid) -> float | None:
    """Bytes/s of a copy of 256 MiB to the next GPU while it copies to this one; None where they do not reach each other's memory."""
    here, there = torch.cuda.current_device(), (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    if here == there or not torch.cuda.can_device_access_peer(here, there):
        return None
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device=f"cuda:{one}") for one in (here, there))
    times = []
    for _ in range(ROUNDS):
        dist.barrier(group=grid.ep.group)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return (1 << 28) / max(mesh.gather(statistics.median(times)))


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


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
