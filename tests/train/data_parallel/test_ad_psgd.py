"""AD-PSGD on gloo ranks: no rank waits for a slow one, and every rank's weights are those of the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.feed.load import PackedTokens
from hone.train.data_parallel.asynchronous.topology import ring_of_two_sides
from tests.train.conftest import SHAPE
from tests.train.data_parallel.async_ranks import worked
from tests.train.data_parallel.test_async_ranks import SHORT, WORKERS, assert_near, flat, kind, mixed_then
from tests.train.data_parallel.test_data_parallel import on_ranks
from tests.train.ranks import BATCH, SEQ, trainer

STEPS, EVERY = 7, 4
ACTIVE, PASSIVE = 2, 1
"""The slow rank of a setting."""
LONGER: dict[str, Any] = {**SHORT, "steps": STEPS, **kind("ad_psgd", sync_every=EVERY)}
SETTINGS: dict[str, dict[str, Any]] = {
    "a slow active rank": {**LONGER, "slow": ACTIVE},
    "a slow passive rank": {**LONGER, "slow": PASSIVE},
    "bf16": {**LONGER, "precision": "bf16", "optimizer": "muon", "steps": 3},
}


@pytest.fixture(scope="module")
def found(data_folder, tmp_path_factory) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[Any]]]:
    """By setting, what each rank found, and each rank's weights after each step.

    That there is any says that no rank waits for the passes of a slow one: it goes on with those of its first step when the others
    have made all steps up to the next meeting, or fails.
    """
    out = tmp_path_factory.mktemp("worked")
    results = on_ranks(WORKERS, worked, str(data_folder), str(out), list(SETTINGS.values()))
    weights = {
        name: [torch.load(out / f"{at}-{rank}.pt") for rank in range(WORKERS)] for at, name in enumerate(SETTINGS)
    }
    return {name: [rank[at] for rank in results] for at, name in enumerate(SETTINGS)}, weights


def drawn(rank: int, step: int) -> int:
    """The neighbour that an active rank asks in a step."""
    neighbours = ring_of_two_sides(rank, WORKERS)
    return neighbours[np.random.default_rng([rank, step]).integers(len(neighbours))]


def test_a_slow_rank_answers_while_it_computes(found):
    """Before its first step a slow passive rank has averaged with all that had drawn it in the steps up to the meeting."""
    log = found[0]["a slow passive rank"][PASSIVE]["log"]
    before = log[: log.index(PASSIVE)]
    asked = {active: sum(drawn(active, step) == PASSIVE for step in range(EVERY - 1)) for active in (0, 2)}
    assert sum(asked.values()) > 0
    assert all(before.count(active) >= times for active, times in asked.items())


def test_each_active_rank_averages_once_a_step(found, data_folder):
    results, _ = found
    size = 4 * SHAPE.model_copy(update={"num_layers": 1}).config(PackedTokens(data_folder).vocab_size).num_params
    for name, setting in SETTINGS.items():
        for active in (0, 2):
            assert results[name][active]["sent"] == {"weights": setting["steps"] * size}
        for passive in (1, 3):
            asked = [(one, step) for one in (0, 2) for step in range(setting["steps"]) if drawn(one, step) == passive]
            assert results[name][passive]["sent"] == ({"mean": len(asked) * size} if asked else {})
            answered = [one for one in results[name][passive]["log"] if one != passive]
            assert sorted(answered) == sorted(one for one, _ in asked)


class Replayed:
    """Algorithm 1 of arXiv:1710.06952 for workers one after the other, in the order of the logs of the passive ranks."""

    def __init__(self, data: PackedTokens, setting: dict[str, Any], logs: list[list[int]]) -> None:
        self.data, self.logs, self.steps = data, [list(log) for log in logs], setting["steps"]
        self.workers = [trainer(data, Mesh(), {**setting, "data_parallel": "ddp"}) for _ in range(WORKERS)]
        for worker in self.workers:
            worker.max_grad_norm = 0.0
        self.values = [self.masters(rank) for rank in range(WORKERS)]
        """What is averaged, beside the weights with which a rank computes."""
        self.found: list[list[dict[str, Tensor]]] = [[] for _ in range(WORKERS)]

    def masters(self, rank: int) -> dict[str, Tensor]:
        masters = self.workers[rank].update.weights.masters
        return flat({name: one.detach().double() for name, one in masters.items()})

    def step(self, rank: int) -> None:
        """The optimizer's step from `values` on, on the gradient at the rank's weights of the step before."""
        worker, done = self.workers[rank], len(self.found[rank])
        update, first = worker.update.apply, done * BATCH + rank * (BATCH // WORKERS)
        worker.update.apply = partial(mixed_then, worker, self.values[rank], update)
        worker.step(self.data.sequences(np.arange(first, first + BATCH // WORKERS), SEQ, 0))
        worker.update.apply = update
        self.values[rank] = self.masters(rank)
        self.found[rank].append({name: one.clone() for name, one in self.values[rank].items()})

    def average(self, active: int, passive: int) -> None:
        pair = (self.values[active], self.values[passive])
        mean = {name: (one + pair[1][name]) / 2 for name, one in pair[0].items()}
        self.values[active], self.values[passive] = mean, dict(mean)

    def meet(self) -> None:
        mean = {name: sum(one[name] for one in self.values) / WORKERS for name in self.values[0]}
        for rank, worker in enumerate(self.workers):
            for name, one in worker.update.weights.masters.items():
                one.detach().view(-1).copy_(mean[name])
            worker.update.weights.publish(list(mean))
            self.values[rank] = dict(mean)
            self.found[rank][-1] = dict(mean)

    def met(self) -> bool:
        """Whether all ranks are in a meeting, whose entries come next in all logs of passive ranks."""
        done = {len(one) for one in self.found}
        step = next(iter(done))
        return len(done) == 1 and step > 0 and (step % EVERY == 0 or step == self.steps)

    def run(self) -> list[list[dict[str, Tensor]]]:
        """Every rank's weights after each of its steps."""
        meetings = 0
        while any(self.logs[rank] for rank in (1, 3)):
            before = [len(log) for log in self.logs]
            for passive in (1, 3):
                while self.logs[passive]:
                    one, done = self.logs[passive][0], len(self.found[self.logs[passive][0]])
                    if one == passive and done == min(EVERY * (meetings + 1), self.steps):
                        break  # a meeting
                    if one != passive and (
                        drawn(one, done) != passive or done == min(EVERY * (meetings + 1), self.steps)
                    ):
                        break  # its neighbour before comes first
                    self.logs[passive].pop(0)
                    if one != passive:
                        self.average(one, passive)
                    self.step(one)
            if self.met() and meetings < -(-len(self.found[0]) // EVERY):
                meetings += 1
                self.meet()
                assert [self.logs[rank].pop(0) for rank in (1, 3)] == [1, 3]
            assert [len(log) for log in self.logs] != before, "the logs do not fit together"
        return self.found


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "bf16"])
def test_weights_are_those_of_the_definition(name, found, data_folder):
    """Every rank's weights after every step, computed again from nothing but the order of averages and steps at passive ranks."""
    torch.set_num_threads(1)
    results, weights = found
    again = Replayed(PackedTokens(data_folder), SETTINGS[name], [one["log"] for one in results[name]]).run()
    for rank in range(WORKERS):
        assert len(again[rank]) == STEPS
        for step in range(STEPS):
            assert_near(weights[name][rank][step], again[rank][step], 5e-6, f"rank {rank}, step {step + 1}")


def test_ranks_differ_between_meetings_alone(found):
    for name, setting in SETTINGS.items():
        ranks, steps = found[1][name], setting["steps"]
        for step in range(steps):
            apart = max((ranks[0][step][one] - ranks[1][step][one]).abs().max() for one in ranks[0][0])
            met = (step + 1) % EVERY == 0 or step + 1 == steps
            assert (apart == 0) == met, f"{name}, step {step + 1}"
    masters = torch.cat([*flat(found[1]["bf16"][3][-1]).values()])
    assert (masters - masters.bfloat16()).abs().max() > 0, "masters are float32"
