"""Child processes of test_ranks: what each rank of a mesh computes with its collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hone.base import ranks as meshes
from hone.base.errors import HoneError, SpecError
from hone.base.ranks import Mesh
from tests.ranked import together


def collectives(num_ranks: int) -> list:
    """The results of `_collectives` on every rank."""
    return [[*one] for one in together(num_ranks, _collectives)]


def _collectives() -> dict:
    dist.init_process_group("gloo")
    meshes.CHUNK = 3  # so that sums take several chunks
    mesh = Mesh.from_environment()
    rank = mesh.rank
    values = torch.tensor([1.0, 1e8, -1e8, 0.5, 3.0], dtype=torch.float32).roll(rank)
    wild = torch.tensor([float(rank), float("nan") if rank == 1 else 0.0])
    rows = torch.full((rank, 2), float(rank), dtype=torch.bfloat16 if rank else torch.float32)
    codes = {f"codes{rank}": torch.tensor([[rank, 2.0]]).to(torch.float8_e4m3fn), f"none{rank}": torch.empty(0, 3)}
    shared = mesh.exchange(codes, "cpu")
    found = {
        "sum": mesh.sum(values).tolist(),
        "counts": mesh.sum(torch.tensor([[rank], [2]])).tolist(),
        "largest": [str(value) for value in mesh.largest(wild).tolist()],
        "joined": mesh.joined(rows).float().tolist(),
        "dtype": str(mesh.joined(rows).dtype),
        "exchanged": {name: tensor.float().tolist() for name, tensor in shared.items()},
        "gathered": mesh.gather(rank * 10),
        "leader": mesh.from_leader(lambda: f"of {rank}"),
    }
    told: list[str] = []
    closed: list[bool] = []
    for trouble in (SpecError("no", fix="yes"), ZeroDivisionError("a bug")):
        try:
            with mesh.together():
                mesh.at_close(closed.append)
                if rank == 1:
                    raise trouble
                mesh.sum(torch.zeros(2))  # the others are here when rank 1 fails
        except (HoneError, ZeroDivisionError) as error:
            told.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    with mesh.together():
        mesh.at_close(closed.append)
    return {**found, "told": told, "closed": closed, "after": mesh.gather(1)}
