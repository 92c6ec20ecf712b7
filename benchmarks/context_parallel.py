"""Attention over a sequence that ranks share, forward and backward: every technique beside torch's own context parallelism.

    python -m benchmarks.context_parallel --device cuda --ranks 4 [--seq-len 32768 131072] [--rounds 3]
    python -m benchmarks.context_parallel --seq-len 1024 --no-ledger          # gloo, to see that it runs

One torchrun; a layer's attention (32 query heads, 8 key heads of 128, causal, one sequence) with the techniques in turn, and the
round with the least seconds counts. The limit of all is the same attention of one device on the whole sequence, divided by the
number of ranks. torch's (GPUs only) is measured with both of its ways to rotate keys, on keys repeated for every query head.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ranks import on_ranks
from hone.base.ranks import Mesh
from hone.ops import attend
from hone.parallel.axis import Axis
from hone.parallel.context.layout import Layout
from hone.train import CONTEXT_PARALLEL
from hone.train.context_parallel.base import ContextParallel

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PEERS = {"torch allgather": "allgather", "torch alltoall": "alltoall"}
LIMIT = "one device / ranks"


def main() -> None:
    """Starts the ranks, prints the table, adds it to the ledger; under torchrun does one rank's part."""
    on_ranks("context_parallel", _arguments(), _work, "context_parallel")


def _work(arguments: argparse.Namespace) -> None:
    """One rank: every technique in turn; rank 0 writes the rows."""
    mesh = Mesh.from_environment()
    device = mesh.place(arguments.device)
    rows: list[dict] = []
    with mesh.together(), mesh.transfers():
        ranks = list(range(mesh.world_size))
        axis = Axis(ranks, mesh.rank, mesh.group([ranks], device), mesh.broken)
        for seq_len in arguments.seq_len:
            best: dict[str, float] = {}
            for _ in range(arguments.rounds):
                for name in [LIMIT, *CONTEXT_PARALLEL, *(PEERS if device.startswith("cuda") else ())]:
                    with _made(name, seq_len, axis, device) as step:
                        seconds = _timed(step, arguments.steps, mesh, device)
                    if name == LIMIT:
                        seconds /= mesh.world_size
                    best[name] = min(best.get(name, seconds), seconds)
            rows += _rows(best, seq_len, arguments)
            if mesh.leads:
                print(f"{seq_len} tokens: {best}", flush=True)
    if mesh.leads:
        arguments.out.write_text(json.dumps(rows))


def _timed(step: Callable[[], None], steps: int, mesh: Mesh, device: str) -> float:
    """Seconds of a call, of the slowest rank."""
    step()  # compiles, and makes connections
    _synchronize(device)
    mesh.gather(None)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(device)
    return max(mesh.gather(time.perf_counter() - started)) / steps


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def _made(name: str, seq_len: int, axis: Axis, device: str) -> Iterator[Callable[[], None]]:
    """One forward and backward pass of the attention called `name`."""
    if name in PEERS:
        with _torchs(PEERS[name], seq_len, axis, device) as step:
            yield step
        return
    if name == LIMIT:
        leaves = _drawn(seq_len, device)
        yield lambda: _both(attend(*leaves), leaves)
        return
    technique = CONTEXT_PARALLEL.read(name)
    assert isinstance(technique, ContextParallel)
    function = technique.attention()
    leaves = _drawn(seq_len // axis.size, device)

    def step() -> None:  # the layout is made for every layer: no part of it is left out of the time
        layout = Layout(seq_len, axis.size, axis.index, zigzag=technique.zigzag, device=device)
        _both(function(*leaves, layout, axis, scale=HEAD_DIM**-0.5), leaves)

    yield step


@contextmanager
def _torchs(rotate: str, seq_len: int, axis: Axis, device: str) -> Iterator[Callable[[], None]]:
    """torch's context parallelism around its scaled_dot_product_attention."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    grid = init_device_mesh("cuda", (axis.size,))
    leaves = [part.detach().transpose(1, 2).contiguous() for part in _drawn(seq_len, device)]
    share = HEADS // KV_HEADS
    leaves = [leaves[0], *(part.repeat_interleave(share, 1) for part in leaves[1:])]
    with context_parallel(grid, buffers=leaves, buffer_seq_dims=[2, 2, 2]):
        for leaf in leaves:
            leaf.requires_grad_(True)
        yield lambda: _both(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves)
        for leaf in leaves:
            leaf.requires_grad_(False)


def _drawn(num_tokens: int, device: str) -> list[Tensor]:
    """q, k, v of `num_tokens` tokens: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    shapes = [(1, num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def _both(out: Tensor, leaves: list[Tensor]) -> None:
    """The backward pass."""
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def _rows(best: dict[str, float], seq_len: int, arguments: argparse.Namespace) -> list[dict]:
    """A row for every technique: tokens/s a rank, beside the faster one of torch's."""
    rows = []
    peers = {name: best[name] for name in PEERS if name in best}
    peer = min(peers, key=lambda name: peers[name]) if peers else None
    for name in CONTEXT_PARALLEL:
        rate = seq_len / arguments.ranks / best[name]
        what = f"attention, {seq_len} tokens on {arguments.ranks} ranks, forward and backward: {name}"
        row = {"figure": what, "value": rate, "unit": "tokens/s a rank", "n": arguments.rounds}
        row |= {"technique": f"context parallelism/{name}", "of_limit": best[LIMIT] / best[name]}
        row |= {"note": f"{best[name]:.4g} s a layer; limit {best[LIMIT]:.4g} s, one device's time / ranks"}
        if peer:
            row |= {
                "peer": peer,
                "peer_value": seq_len / arguments.ranks / peers[peer],
                "ratio": peers[peer] / best[name],
            }
        rows.append(row)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
