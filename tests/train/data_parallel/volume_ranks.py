"""What each of several ranks does in the tests of what travels: steps whose bytes are counted, and the parts of ZeRO++."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.train.data_parallel.moves import Moves
from hone.train.data_parallel.travel import Travel
from hone.train.parallelism import Parallelism
from tests.train.ranks import batch, trainer

SIZE = 512
"""Elements of a rank's slice."""


def counted(folder: str, out: str, settings: list[dict[str, Any]]) -> list[list[Any]]:
    """For each setting [the bytes that this rank sent in the last step by collective, losses of all steps].

    Rank 0 writes the weights at the end.
    """
    torch.set_num_threads(1)
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    for number, setting in enumerate(settings):
        with mesh.together():
            one = trainer(data, mesh, setting)
            losses = []
            for step in range(setting.get("steps", 2)):
                before = one.ranks.grid.sent
                losses.append(one.step(batch(data, one.ranks, step)).loss)
            sent = {name: count - before[name] for name, count in one.ranks.grid.sent.items()}
            weights = {}
            with mesh.transfers():
                for path, part in Parallelism.parts(one, wide=True, keep=True):
                    weights |= {f"{path}.{name}": value.detach().clone() for name, value in part.named_parameters()}
            if mesh.leads:
                torch.save(weights, Path(out) / f"{number}.pt")
            found.append([sent, losses])
    return found


def drawn(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """(the slice of the weights, the gradient of all of them) of a rank; sizes differ from block to block, one is zero."""
    draw = torch.Generator().manual_seed(rank)
    whole = torch.randn(num_ranks * SIZE, generator=draw) * torch.logspace(-6, 2, num_ranks * SIZE)
    whole[SIZE : SIZE + 256] = 0
    return torch.randn(SIZE, generator=draw), whole


def travelled(moves: list[tuple[int, int, int]]) -> list[list[Any]]:
    """For each of `moves` [the weights that this rank gathers, its slice of the summed gradient]."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), []
    with mesh.together(), mesh.transfers():
        grid = Parallelism.read({"data_parallel": "zero3"}).grid(mesh, "cpu")
        own, whole = drawn(mesh.rank, mesh.world_size)
        for one in moves:
            travel, weights = Travel(grid, Moves(*one)), torch.empty(mesh.world_size * SIZE)
            moving = travel.gather(weights, travel.own(own, torch.float32))
            moving.wait()
            found.append([weights.tolist(), travel.reduce(whole.clone()).part().tolist()])
    return found
