"""What each of several ranks does in the tests of expert parallelism."""

from __future__ import annotations

from typing import Any

import torch

from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from tests.train.ranks import batch, trainer

ONE: dict[str, Any] = {"kind": "moe", "num_experts": 4, "intermediate_size": 32}


def held(folder: str) -> list[Any]:
    """The shapes of a rank's experts, the bytes of rows that it sent in a step, and how many rows it gave to the other one and took of it."""
    torch.set_num_threads(1)
    mesh, data = Mesh.from_environment(), PackedTokens(folder)
    with mesh.together():
        one = trainer(
            data,
            mesh,
            {"model": {"num_layers": 1, "feed_forward": [ONE]}, "parallelism": {"expert_parallel_degree": 2}},
        )
        moe, grid = one.model.layers[0].feed_forward, one.ranks.grid
        assert grid is not None and grid.expert_rows is not None
        seen: list[int] = []
        dispatch = moe.exchange.dispatch

        def watched(rows: torch.Tensor, ends: torch.Tensor) -> Any:
            sent = dispatch(rows, ends)
            away = 1 - grid.ep.index
            seen.extend((sent.sizes.given[away], sent.sizes.taken[away]))
            return sent

        moe.exchange.dispatch = watched
        one.step(batch(data, one.ranks, 0))
        sent = grid.expert_rows.sent["all_to_all"]
    return [[list(one.weight.shape) for one in (moe.gate_up, moe.down)], sent, sum(seen)]
