"""The rules of asynchronous data parallelism without processes: who may read when, what a read has seen, who mixes with whom."""

from __future__ import annotations

import math
import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stragglers import ends
from hone.base.artifact import Artifact
from hone.base.errors import SpecError
from hone.base.plan import facts_of
from hone.cost.ranks import LINK_BYTES_PER_S, MESSAGE_S, Transfers
from hone.measure.machine import describe
from hone.train import DATA_PARALLEL
from hone.train.data_parallel.asynchronous.ad_psgd import Averaged
from hone.train.data_parallel.asynchronous.shard import Keys, Push, Shard
from hone.train.data_parallel.asynchronous.topology import every_other, exponential, ring, ring_of_two_sides
from hone.train.stage import Train
from tests.train.conftest import SHAPE

SERVED = ["bsp", "ssp", "asp"]
BITS = 20


class Recorded:
    """Optimizer steps that add up gradients times the rate: a sum of one-hot gradients says which have been applied."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.rates = values, []

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        self.values.add_(gradient, alpha=lr)
        self.rates.append(lr)


def played(workers: int, clocks: int, bound: float, seed: int, meets: int = 0) -> tuple[Shard, Recorded, int]:
    """A shard and its steps after all workers' clocks, in a random order that the rules allow, each read checked; and the most by
    which one was behind."""
    values = torch.zeros(workers * clocks, dtype=torch.float64)
    buffers = [torch.zeros_like(values) for _ in range(workers)]
    steps, draw, done, behind = Recorded(values), random.Random(seed), [0] * workers, 0
    shard = Shard(steps, values, buffers)
    while min(done) < clocks:
        ready = [one for one in range(workers) if done[one] < clocks and not shard.waits(one)]
        assert ready, "a dead-lock"
        worker = draw.choice(ready)
        done[worker] += 1
        met = done[worker] == clocks or (meets and done[worker] % meets == 0)
        buffers[worker].zero_()[worker * clocks + done[worker] - 1] = 1.0
        for one in shard.push(worker, Push(done[worker], 1.0, 2.0, 0.0 if met else bound)):
            seen = (buffers[one].view(workers, clocks) > 0).sum(1).tolist()
            assert seen == list(shard.seen[one]) == done, (
                "a read has all gradients that have come, each worker's from the first on"
            )
            behind = max(behind, done[one] - min(seen))
            if meets and done[one] % meets == 0:
                assert seen == [done[one]] * workers, "ranks that meet have the same weights"
    assert not any(shard.waits(one) for one in range(workers))
    return shard, steps, behind


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 5),
    st.integers(1, 9),
    st.sampled_from([0, 1, 2, 4, math.inf]),
    st.integers(0, 10**6),
    st.integers(0, 4),
)
def test_staleness_is_bounded_and_nothing_deadlocks(workers, clocks, bound, seed, meets):
    _, steps, behind = played(workers, clocks, bound, seed, meets)
    assert behind <= bound
    # Each gradient once: its share of the step's targets times the step's share of the rate is 1 / workers, in whichever step.
    np.testing.assert_allclose(steps.values.numpy(), 1 / workers, rtol=1e-12)
    assert math.isclose(sum(steps.rates), clocks)
    if bound == 0:
        assert len(steps.rates) == clocks, "one step a clock"


def test_the_bounds_are_reached():
    """A schedule in which every worker but one is as far ahead as it may be: the bound is no looser and no tighter."""
    for bound in (1, 3):
        assert max(played(3, 8, bound, seed)[2] for seed in range(30)) == bound
    assert max(played(3, 8, math.inf, seed)[2] for seed in range(30)) > 4


def test_with_bound_0_bits_do_not_depend_on_who_comes_first():
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        draw = torch.Generator().manual_seed(0)
        gradients, values = torch.randn(2, 3, 64, generator=draw), torch.zeros(64)
        buffers = [torch.zeros(64) for _ in range(3)]
        shard = Shard(Recorded(values), values, buffers)
        for clock in (1, 2):
            for worker in order:
                buffers[worker].copy_(gradients[clock - 1, worker])
                due = shard.push(worker, Push(clock, 0.3 / clock, 3.0 + worker, 0.0))
            assert sorted(due) == [0, 1, 2]
        weights = torch.tensor([3.0, 4.0, 5.0]) / 12
        expected = sum((weights @ gradients[at]) * 0.3 / (1 + at) for at in (0, 1))
        torch.testing.assert_close(values, expected)
        found.append(values)
    assert torch.equal(*found)


@pytest.mark.parametrize("mixed", [ring, exponential])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_mixing_is_doubly_stochastic_and_mixes(mixed, size):
    product = np.eye(size)
    for step in range(40):
        matrix = np.zeros((size, size))
        for rank in range(size):
            one = mixed(step, rank, size)
            matrix[rank, rank] = 1 - sum(one.sources.values())
            for peer, share in one.sources.items():
                matrix[rank, peer] = share
                assert rank in mixed(step, peer, size).targets, "who is waited for sends"
            assert all(rank in mixed(step, peer, size).sources for peer in one.targets)
        np.testing.assert_allclose([matrix.sum(0), matrix.sum(1)], 1)
        assert (matrix >= 0).all()
        product = matrix @ product
        if mixed is exponential and size in (2, 4, 8) and step + 1 == math.log2(size):
            np.testing.assert_allclose(product, 1 / size)  # all of them are averaged
    np.testing.assert_allclose(product, 1 / size, atol=1e-3)


@pytest.mark.parametrize("neighbours", [every_other, ring_of_two_sides])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_pairs_are_of_both_sides_and_reach_all(neighbours, size):
    """A bipartite connected graph, in which whoever asks is asked by nobody: so that nobody waits for one that waits."""
    edges = {(rank, peer) for rank in range(size) for peer in neighbours(rank, size)}
    assert edges == {(peer, rank) for rank, peer in edges}
    assert all(rank % 2 != peer % 2 for rank, peer in edges)
    assert all(neighbours(rank, size) for rank in range(size))
    reached = {0}
    for _ in range(size):
        reached |= {peer for rank, peer in edges if rank in reached}
    assert reached == set(range(size))
    if neighbours is every_other:
        assert len(edges) == 2 * (size // 2) * (size - size // 2)
    else:
        assert max(len(neighbours(rank, size)) for rank in range(size)) <= 2


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.sampled_from([every_other, ring_of_two_sides]), st.integers(0, 10**6))
def test_an_average_of_two_is_symmetric_and_doubly_stochastic(size, neighbours, seed):
    """Rank r begins with unit vector r, so that all weights together are the product of the matrices so far."""
    draw = random.Random(seed)
    rows = torch.eye(size, dtype=torch.float64)
    weights = [Averaged(row) for row in rows]
    for _ in range(60):
        active = draw.choice(range(0, size, 2))
        passive, before, came = draw.choice(neighbours(active, size)), rows.clone(), rows[active].clone()
        weights[passive].average(came)  # what the passive rank does; the active one takes what comes back
        rows[active] = came
        assert torch.equal(rows[active], rows[passive])
        matrix = torch.eye(size, dtype=torch.float64)
        matrix[[active, active, passive, passive], [active, passive, active, passive]] = 0.5
        assert torch.equal(rows, matrix @ before)
        assert torch.equal(matrix, matrix.T)
        np.testing.assert_allclose([rows.sum(0), rows.sum(1)], 1, rtol=1e-12)
    many = draw.choices(range(0, size, 2), k=400)
    for active in many:
        came = rows[active].clone()
        weights[draw.choice(neighbours(active, size))].average(came)
        rows[active] = came
    np.testing.assert_allclose(rows, 1 / size, atol=0.02)  # every rank's weights reach all


def test_an_average_keeps_what_a_step_of_its_own_rank_made():
    """Averages that come while a rank changes its weights wait, so that none is lost: their sum stays."""
    own, others = Averaged(torch.zeros(1000)), [torch.full((1000,), float(2**at)) for at in range(8)]
    threads = [threading.Thread(target=own.average, args=(one,)) for one in others]
    with own.turn:
        for one in threads:
            one.start()
        seen = own.values.clone()
        own.values.add_(1024.0)
        assert not seen.any()
    for one in threads:
        one.join(60)
        assert not one.is_alive()
    total = own.values + sum(others)
    assert torch.equal(total, torch.full((1000,), 1024.0 + 255.0)), "halves of small powers of two are exact"


def test_servers_have_equal_parts_and_whole_matrices_where_asked():
    shapes = {"a": (300, 7), "b": (5,), "c": (64, 64), "d": (32, 32), "e": (1000,)}
    for whole in ((), ("c", "d"), tuple(shapes)):
        keys = Keys(shapes, whole, 3)
        seen = {name: np.zeros(math.prod(shape), int) for name, shape in shapes.items()}
        for server in range(3):
            used = np.zeros(keys.slice_size, int)
            for name, start, stop, at in keys.ranges(server):
                seen[name][start:stop] += 1
                used[at : at + stop - start] += 1
                assert name not in whole or stop - start == math.prod(shapes[name])
            assert used.max(initial=0) <= 1
        assert all((count == 1).all() for count in seen.values())


def test_what_a_straggler_costs():
    """Against the rules step by step: a worker begins when all are done with the step that it must have seen."""
    draw = np.random.default_rng(0)
    seconds = draw.exponential(size=(4, 30)) + 0.1
    bsp = ends(seconds, 0)
    assert max(one[-1] for one in bsp) == pytest.approx(seconds.max(0).sum()), "the slowest of each step"
    asp = ends(seconds, math.inf)
    np.testing.assert_allclose([one[-1] for one in asp], seconds.sum(1))
    last = [max(one[-1] for one in ends(seconds, bound)) for bound in (0, 1, 2, 5, 30)]
    assert last == sorted(last, reverse=True) and last[-1] == max(one[-1] for one in asp)
    for bound in (0, 1, 3):
        found = np.asarray(ends(seconds, bound))
        for step in range(30):
            begun = found[:, step] - seconds[:, step]
            must = found[:, step - 1 - bound].max() if step > bound else 0.0
            own = found[:, step - 1] if step else np.zeros(4)
            np.testing.assert_allclose(begun, np.maximum(must, own))
    local = ends(seconds, math.inf, sync_every=10)
    assert max(one[-1] for one in local) == pytest.approx(
        sum(seconds[:, at : at + 10].sum(1).max() for at in (0, 10, 20))
    )
    near = np.asarray(ends(seconds, math.inf, peers=lambda step, worker: tuple(ring(step, worker, 4).sources)))
    for step in range(1, 30):
        for worker in range(4):
            others = near[[(worker - 1) % 4, (worker + 1) % 4], step - 1].max()
            assert near[worker, step] == pytest.approx(max(near[worker, step - 1] + seconds[worker, step], others))
    assert max(one[-1] for one in asp) < near[:, -1].max() < last[0]


def test_what_travels_and_what_is_kept():
    dims = SHAPE.config(256).dims()
    params = dims.num_params

    def divided(kind: str, **more: Any) -> Any:
        return DATA_PARALLEL.read({"kind": kind, "num_workers": 4, **more}).divided(4)

    ddp = DATA_PARALLEL.read("ddp").divided(4)
    for kind in SERVED:
        one = divided(kind)
        assert sum(message.sent_bytes for message in one.messages(dims, 4, 1)) == pytest.approx(2 * 4 * params * 3 / 4)
        assert one.weights_bytes(dims, 4) - ddp.weights_bytes(dims, 4) == pytest.approx(8 * params)
        assert one.weights_bytes(dims, 2) - ddp.weights_bytes(dims, 2) == pytest.approx(8 * params)
        assert one.gradient_bytes(dims, 1) == ddp.gradient_bytes(dims, 1) and one.of("optimizer") == 4
    for topology, rooms in (("ring", 2), ("exponential", 2)):
        one = divided("gossip", topology=topology)
        assert one.weights_bytes(dims, 4) - ddp.weights_bytes(dims, 4) == 4 * (2 + rooms) * params
    for topology, workers, rooms in (
        ("ring", 4, 2),
        ("ring", 2, 1),
        ("ring", 9, 2),
        ("complete", 4, 2),
        ("complete", 9, 5),
    ):
        kind = {"kind": "ad_psgd", "topology": topology, "num_workers": workers}
        one = DATA_PARALLEL.read(kind).divided(workers)
        more = one.weights_bytes(dims, 4) - DATA_PARALLEL.read("ddp").divided(workers).weights_bytes(dims, 4)
        assert more == 4 * (2 + rooms) * params, "the common ones, those that are averaged, and of each who asks"
    for kind, peers in (("local_sgd", 0), ("gossip", 2), ("ad_psgd", 1)):
        one = divided(kind, sync_every=10)
        assert one.sent_bytes(dims, 4, 1) == pytest.approx((peers + 3 / 10) * 4 * params), kind
    assert ddp.sent_bytes(dims, 4, 1) == pytest.approx(2 * 4 * params * 3 / 4)
    seconds = partial(divided("gossip", sync_every=10**6).step_s, dims, "float32", 1, "cpu")
    less = partial(divided("gossip", sync_every=10**6, topology="exponential").step_s, dims, "float32", 1, "cpu")
    often = partial(divided("gossip", sync_every=1).step_s, dims, "float32", 1, "cpu")
    assert less() < seconds() < often()


def test_estimated_waits_of_asynchronous_training():
    """The seconds of a step that pass beside nothing, on GPUs, whose ranks exchange over their hosts' connections."""
    dims, about = SHAPE.config(300).dims(), (SHAPE.config(300).dims(), "bfloat16")
    for kind in SERVED:
        one = DATA_PARALLEL.read({"kind": kind, "num_workers": 4}).divided(4)
        sent = sum(message.sent_bytes for message in one.messages(dims, 2, 1))
        waits = one.exposed_s(*about, "cuda", Transfers("cuda"))
        assert (
            waits
            == one.step_s(*about, 1, "cuda")
            == pytest.approx(2 * MESSAGE_S["cpu"] + sent / LINK_BYTES_PER_S["cpu"])
        )
    often, never = (
        DATA_PARALLEL.read({"kind": "gossip", "num_workers": 4, "sync_every": every}).divided(4) for every in (2, 10**9)
    )
    mixed = never.step_s(*about, 1, "cuda")
    assert mixed == pytest.approx(MESSAGE_S["cpu"] + 2 * 4 * dims.num_params / LINK_BYTES_PER_S["cpu"], rel=1e-3)
    answered = DATA_PARALLEL.read({"kind": "ad_psgd", "num_workers": 4, "sync_every": 10**9}).divided(4)
    turn = MESSAGE_S["cpu"] + 4 * dims.num_params / LINK_BYTES_PER_S["cpu"]
    assert answered.step_s(*about, 1, "cuda") == pytest.approx(2 * turn, rel=1e-3), "there, and the mean back"
    assert answered.exposed_s(*about, "cuda", Transfers("cuda")) < turn / 1000, "beside the passes"
    meeting = Transfers("cuda").seconds("all_gather", 4, 4 * 4 * dims.num_params) / 2
    assert often.exposed_s(*about, "cuda", Transfers("cuda")) == pytest.approx(meeting)
    assert often.step_s(*about, 1, "cuda") == pytest.approx(meeting + mixed)


def test_what_does_not_work_is_said(data_folder):
    spec = {"model": SHAPE.model_dump(), "batch_size": 4, "seq_len": 32, "steps": 4, "checkpoint": {"interval": 20}}

    def read(kind: Any, **others: Any) -> Train:
        return Train.read({**spec, **others, "parallelism": {"data_parallel": kind}})

    with pytest.raises(SpecError, match=r"validation\.interval 2 is no multiple of the 3 steps"):
        read({"kind": "ssp", "sync_every": 3}, checkpoint={"interval": 6}, validation={"interval": 2})
    with pytest.raises(SpecError, match=r"checkpoint\.interval 20 is no multiple of the 3 steps"):
        read({"kind": "gossip", "sync_every": 3})
    assert read("bsp", validation={"interval": 1}), "with bsp all ranks meet in every step"
    with pytest.raises(SpecError, match=r"checkpoint\.interval 20 is no multiple of the 3 steps"):
        read({"kind": "ad_psgd", "sync_every": 3})
    with pytest.raises(SpecError, match=r"topology"):
        read({"kind": "ad_psgd", "topology": "star"})
    with pytest.raises(SpecError, match="asp works in bf16, fp32, not in fp16"):
        read("asp", precision="fp16")
    with pytest.raises(SpecError, match="skip_step does not work with data_parallel bsp"):
        read("bsp", optimizer={"skip_step": True})
    with pytest.raises(SpecError, match=r"checkpoint\.check works where ranks have the same weights"):
        read("gossip", checkpoint={"interval": 20, "check": {"rerun_interval": 2}})
    with pytest.raises(SpecError, match="ssp works with data-parallel ranks only"):
        Train.read({**spec, "parallelism": {"data_parallel": "ssp", "pipeline_parallel_degree": 2}})
    with pytest.raises(SpecError, match="staleness"):
        read({"kind": "ssp", "staleness": -1})
    facts = {"data": facts_of(Artifact.read(data_folder))}
    kept = {"checkpoint": {"interval": 0, "keep": "optimizer"}, "schedule": {"kind": "wsd", "warmup": 1, "decay": 1}}
    with pytest.raises(
        SpecError, match=r"keeps the state after step 3, and the ranks of data_parallel asp .* every 2 steps"
    ):
        read({"kind": "asp", "sync_every": 2}, **kept).plan(facts, describe("cpu").model_copy(update={"num_ranks": 2}))
    machine = describe("cpu").model_copy(update={"num_ranks": 4})
    for kind in (*SERVED, "gossip", "ad_psgd"):
        with pytest.raises(SpecError, match=f"{kind} is set to 2 ranks, and 4 started") as caught:
            read(kind).plan(facts, machine)
        assert "set parallelism.data_parallel.num_workers to 4" in caught.value.fix
        plan = read({"kind": kind, "num_workers": 4}).plan(facts, machine)
        assert "transfers" in plan.estimates["time_s"].formula
