"""What each of several ranks does in the tests of compressed sums, and the gradients they have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.train import DATA_PARALLEL
from hone.train.data_parallel.flat import Flat
from hone.train.parallelism import Parallelism

SHAPES = {"a": (24, 40), "norm": (17,), "b": (64, 16), "small": (4, 3)}
STEPS = 3


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """The gradient of each weight that a rank computes in a step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def summed(kinds: list[Any]) -> list[Any]:
    """For each data-parallel technique: the summed gradient after each step by weight, and this rank's errors at the end."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), []
    with mesh.together(), mesh.transfers():
        axis = Parallelism().grid(mesh, "cpu").copies.replicate
        for kind in kinds:
            summing, flat = DATA_PARALLEL.read(kind).summing(), Flat(SHAPES, 1, whole=False)
            steps = []
            for step in range(STEPS):
                part = torch.zeros(flat.size)
                for name, values in gradients(mesh.rank, step).items():
                    flat.view(part, name).copy_(values)
                moving = summing.start(axis, flat, part, "a")
                if moving is not None:
                    moving.wait()
                steps.append({name: flat.view(part, name).tolist() for name in SHAPES})
            error = summing.state().get("error.a")
            errors = {} if error is None else {name: flat.view(error, name).tolist() for name in SHAPES}
            found.append([steps, errors])
    return found
