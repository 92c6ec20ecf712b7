"""What each of several ranks does in the tests of expert parallelism."""

from __future__ import annotations

from typing import Any

import torch

from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.model.context import Context
from hone.model.decoder import build
from hone.train.data_parallel.bucket import Bucket
from hone.train.fp8.linears import Fp8Linears
from hone.train.parallelism import Parallelism
from hone.train.precision import FP8_RECIPES
from tests.train.conftest import SHAPE
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

        def watched(rows: torch.Tensor, ends: torch.Tensor, room: int | None = None) -> Any:
            sent = dispatch(rows, ends, room)
            away = 1 - grid.ep.index
            seen.extend((sent.sizes.given[away], sent.sizes.taken[away]))
            return sent

        moe.exchange.dispatch = watched
        one.step(batch(data, one.ranks, 0))
        sent = grid.expert_rows.sent["all_to_all"]
    return [[list(one.weight.shape) for one in (moe.gate_up, moe.down)], sent, sum(seen)]


def crowded(precisions: list[str]) -> list[Any]:
    """Of a layer of gpt-oss's form whose router sends every token to the first half of its experts, in each of `precisions`: this rank's
    result, the gradient of its tokens, those of the experts that it has, and how many rows these had."""
    torch.set_num_threads(1)
    mesh, found = Mesh.from_environment(), []
    config = SHAPE.model_copy(update={"num_layers": 1, "feed_forward": ({**ONE, "biases": True, "swiglu_limit": 0.5},)})
    for precision in precisions:
        with mesh.together():
            model, draw = build(config.config(64), seed=1), torch.Generator().manual_seed(0)
            for name, one in model.layers[0].feed_forward.named_parameters():
                if name.endswith("bias"):
                    one.data = 0.1 * torch.randn(one.shape, generator=draw)
            model.layers[0].feed_forward.router.bias.data = torch.tensor([9.0, 9.0, 0.0, 0.0])
            parallelism = Parallelism.read({"expert_parallel_degree": mesh.world_size})
            model = parallelism.decoder(model, parallelism.ranks(mesh, "cpu"), 16)
            if precision in FP8_RECIPES:
                Fp8Linears(model, precision, holds=False)
            moe = model.layers[0].feed_forward
            rows: list[int] = []
            moe.gate_up.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(len(given[0])))
            x = torch.randn(4, 16, SHAPE.hidden_size, generator=draw).chunk(mesh.world_size)[mesh.rank].requires_grad_()
            y = moe(x, Context())
            y.square().sum().backward()
            experts = [*moe.gate_up.parameters(), *moe.down.parameters()]
            found.append([one.tolist() for one in (y, x.grad, *(one.grad for one in experts))] + [rows])
    return found


def in_rooms(folder: str, settings: list[dict[str, Any]]) -> list[Any]:
    """Trains with each of `settings` with exact sizes, in rooms, and in rooms that are too small in the second step for the ranks that share experts
    with rank 0: the losses and norms of the steps, the room and the passes made again after them, and the rows that experts computed with."""
    torch.set_num_threads(1)
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    for setting in settings:
        for way in ("exact", "rooms", "small"):
            with mesh.together():
                one = trainer(data, mesh, setting)
                moe = next(
                    layer.feed_forward for layer in one.model.layers if getattr(layer.feed_forward, "routed", False)
                )
                bound, rows, steps = moe.exchange.bound, [], []
                one.rooms.fixed = way != "exact"
                moe.gate_up.register_forward_pre_hook(lambda _, given, rows=rows: rows.append(len(given[0])))
                for at in range(4):
                    if way == "small" and at == 1 and 0 in moe.exchange.axis.ranks:
                        bound.rows = 1
                    step = one.step(batch(data, one.ranks, at, uneven=setting.get("uneven", False)))
                    steps.append([step.loss, step.grad_norm])
                found.append([steps, bound.rows, bound.overflows, rows])
    return found


def kept(folder: str) -> list[Any]:
    """Trains experts in bf16 whose gradients stay as the pass left them, and are widened and laid into one tensor: losses and norms, their dtypes."""
    torch.set_num_threads(1)
    mesh, data, found = Mesh.from_environment(), PackedTokens(folder), []
    begin = Bucket.begin
    for way in ("kept", "widened"):
        with mesh.together():
            setting = {"model": {"num_layers": 1, "feed_forward": [ONE]}, "precision": "bf16"}
            one = trainer(data, mesh, {**setting, "parallelism": {"expert_parallel_degree": 2}})
            dtypes: set[str] = set()

            def watched(self: Bucket, last: bool, way: str = way) -> None:
                begin(self, last)
                if way == "widened" and self._keeps:
                    self._keeps, self._travels = False, torch.float32

            take = one.update.weights.take_grads

            def seen(names: Any, factor: Any, take: Any = take, one: Any = one, dtypes: set[str] = dtypes) -> Any:
                dtypes.update(str(one.update.weights.grad(name).dtype) for name in names if "feed_forward.down" in name)
                return take(names, factor)

            one.update.weights.take_grads = seen
            Bucket.begin = watched  # type: ignore[method-assign]
            try:
                steps = [one.step(batch(data, one.ranks, at)) for at in range(4)]
            finally:
                Bucket.begin = begin  # type: ignore[method-assign]
            found.append([[[step.loss, step.grad_norm] for step in steps], sorted(dtypes)])
            one.update.weights.take_grads = take
    return found
