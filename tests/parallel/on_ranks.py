"""What each of several ranks does in the tests of collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hone.parallel.group import Group, Pipe
from hone.parallel.one_shot import OneShot
from hone.parallel.place import Place
from tests import ranked

ROOT = Path(__file__).resolve().parents[2]


def collectives(size: int) -> list:
    """The sums and joins of `size` ranks on CPUs."""
    return _results(ranked.together(size, _collectives))


def piped(count: int) -> list:
    """What the second of two stages receives of `count` tensors."""
    return _results(ranked.together(2, _piped, count))


def expected(size: int) -> list:
    """What every rank of `collectives` finds."""
    each = [_of(rank) for rank in range(size)]
    half = sum(one.bfloat16().float() for one in each).bfloat16()
    return [sum(each).tolist(), half.tolist(), torch.cat(each, -1).tolist()]


def _of(rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))


def _collectives() -> list:
    place = _begin("gloo")
    group, x = Group(place), _of(place.tensor_rank)
    return [group.all_reduce(x).tolist(), group.all_reduce(x.bfloat16()).tolist(), group.all_gather(x).tolist()]


def _piped(count: int) -> list:
    whole = _begin("gloo")
    pipe = Pipe(Place(0, 1, whole.rank, 2))
    if whole.rank == 0:
        for step in range(count):
            pipe.send(torch.full((7,), float(step)))
        dist.barrier()
        return []
    found = [float(pipe.receive((7,), torch.zeros(())).mean()) for _ in range(count)]
    dist.barrier()
    return found


def _begin(backend: str) -> Place:
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return Place(dist.get_rank(), dist.get_world_size())


def _results(ended: list[ranked.Ended]) -> list:
    assert all(one.returncode == 0 for one in ended), "\n".join(one.stderr for one in ended)
    return [one.result for one in ended]


def on_gpus(size: int) -> list[str]:
    """The last line of each of `size` processes that run `_on_gpu`."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(size),
        "-m",
        "tests.parallel.on_ranks",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [line for line in ended.stdout.split() if line == "right"]


def _on_gpu() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=device)
    place = Place(dist.get_rank(), dist.get_world_size())
    one = OneShot(dist.group.WORLD, place.tensor_rank, place.tensor_size, device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (16, 4096, 8192, 65536, 131072):
            x = torch.randn(count, device=device, generator=torch.Generator(device).manual_seed(place.rank)).to(dtype)
            every = [torch.empty_like(x) for _ in range(place.tensor_size)]
            dist.all_gather(every, x)
            wanted = sum(part.float() for part in every).to(dtype)
            assert torch.equal(one.all_reduce(x), wanted), f"{dtype} {count}"
    x = torch.zeros(4096, device=device)
    graph = torch.cuda.CUDAGraph()
    one.all_reduce(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(5):  # an odd number: the halves change their roles with every replay
            y = one.all_reduce(y)
    for step in range(1000):
        x.fill_(step % 7 + place.rank)
        graph.replay()
        if step % 3 == 0:
            one.all_reduce(x[: 16 * (1 + step % 5)])
        wanted = place.tensor_size * (step % 7) + place.tensor_size * (place.tensor_size - 1) / 2
        assert bool((y == wanted * place.tensor_size**4).all()), f"replay {step}"
    torch.cuda.synchronize()
    dist.barrier()
    print("right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_gpu()
