"""Offload on several ranks and hosts: whose memory counts, what a plan says, what `auto` takes where little works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hone.base.artifact import Artifact
from hone.base.errors import FitError, SpecError
from hone.base.plan import facts_of
from hone.base.ranks import Mesh
from hone.base.run import Run
from hone.cost.train.offload import places, times
from hone.cost.train.replicas import Divided
from hone.measure.machine import describe, machine_of
from hone.train.offload import choose
from hone.train.offload.choose import chosen
from hone.train.offload.memory import Stage
from hone.train.stage import Train
from tests.train.offload.test_offload_places import GPU, RATES, spec, work

RANKS = 8
SHARED = Divided(RANKS, RANKS, frozenset({"optimizer"}))
CUDA = GPU.model_copy(
    update={"gpus": (GPU.gpus[0].model_copy(update={"num_multiprocessors": 132}),), "num_ranks": RANKS}
)
"""A machine with a GPU for each of its ranks, as if it were here."""


RARE = {"validation": {"interval": 20}, "checkpoint": {"interval": 20}}
"""When the weights of asynchronous ranks are the same."""


def host_of(local: int | None) -> Any:
    return CUDA.model_copy(update={"num_local_ranks": local})


def test_a_run_knows_the_ranks_of_its_host():
    run = Run(quiet=True, mesh=Mesh(5, 1, RANKS, 2))
    assert (machine_of(run).num_ranks, machine_of(run).local_ranks) == (RANKS, 2)
    assert machine_of(Run(quiet=True, mesh=Mesh(5, 1, RANKS))).local_ranks == RANKS
    assert machine_of(Run(quiet=True)).local_ranks == 1


def test_ranks_of_other_hosts_use_none_of_its_memory(monkeypatch):
    """Eight ranks with a share of 12 bytes a weight each: on one host all of it, on four hosts a quarter; and they share its threads."""
    one = replace(work("host"), divided=SHARED)
    share = places(one.offload, one.load, "cuda:0").host
    monkeypatch.setattr(choose, "_host_room", lambda _: 3 * share)
    with pytest.raises(FitError, match="of the host's memory"):
        chosen(one, host_of(None), "bf16")
    _, [line] = chosen(replace(one, local_ranks=2), host_of(2), "bf16")
    assert ", of each of 2 ranks on this host: predicted" in line
    near, far = (
        times(one.offload, replace(one, local_ranks=local).load, host_of(local), 1.0, RATES) for local in (8, 2)
    )
    assert near.update == pytest.approx(4 * far.update)


def test_ranks_of_other_hosts_use_none_of_its_disk(monkeypatch):
    one = replace(work("nvme"), divided=SHARED)
    share = places(one.offload, one.load, "cuda:0").disk

    class Status:
        f_bavail, f_frsize = int(3 * share), 1

    monkeypatch.setattr(choose.os, "statvfs", lambda _: Status)
    monkeypatch.setattr(choose, "_host_room", lambda _: 100 * share)
    with pytest.raises(FitError, match="are free"):
        chosen(one, host_of(None), "bf16")
    chosen(replace(one, local_ranks=2), host_of(2), "bf16")


def test_ranks_of_other_hosts_leave_a_cpu_its_memory():
    one = describe("cpu").model_copy(update={"num_ranks": 4})
    two = one.model_copy(update={"num_local_ranks": 2})
    assert two.free_memory_bytes - one.free_memory_bytes == pytest.approx(one.ram_bytes / 4, rel=0.02)


def test_the_work_of_a_stage_has_the_ranks_of_its_host(data_folder, monkeypatch):
    """`LOCAL_WORLD_SIZE` reaches the estimate: ranks of one host compute the update with its threads, those of two with theirs."""
    facts = {"data": facts_of(Artifact.read(data_folder))}
    found = []
    for local in (None, 1):
        machine = describe("cpu").model_copy(update={"num_ranks": 2, "num_local_ranks": local})
        told = {"kind": "host"}
        plan = Train.read({**spec(told), "parallelism": {"offload": told, "data_parallel": "zero2"}}).plan(
            facts, machine
        )
        [line] = [one for one in plan.notes if one.startswith("offload")]
        assert ("of each of 2 ranks on this host" in line) == (local is None)
        found.append(plan.estimates["offload_update_s"].value)
    assert found[0] == pytest.approx(2 * found[1])


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (2, {"parallelism": {"offload": "auto"}}, "would keep 2 copies"),
        (2, {"parallelism": {"offload": "auto", "data_parallel": "local_sgd"}}, "would keep 2 copies"),
        (2, {"parallelism": {"offload": "auto", "data_parallel": "asp"}, **RARE}, "would keep 2 copies"),
        (2, {"parallelism": {"offload": "auto", "tensor_parallel_degree": 2}}, "context parallelism only"),
        (2, {"parallelism": {"offload": "auto", "pipeline_parallel_degree": 2}}, "context parallelism only"),
        (1, {"parallelism": {"offload": "auto"}, "precision": "fp8"}, "not in fp8"),
        (1, {"parallelism": {"offload": "auto"}, "checkpoint": {"async_mode": "async"}}, "would copy it there"),
        (1, {"parallelism": {"offload": "auto"}}, ""),
    ],
)
def test_auto_trains_where_none_does(ranks, changes, said, data_folder):
    """What does not go with the rest of a training is no candidate, and the plan says why; a model that fits is all on the device."""
    more = {"checkpoint": {"interval": 8}, "validation": {"interval": 8}, **changes}
    machine = describe("cpu").model_copy(update={"num_ranks": ranks})
    if changes.get("precision") == "fp8":
        more["model"] = {**spec("none")["model"], "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    plan = Train.read({**spec("auto"), **more}).plan({"data": facts_of(Artifact.read(data_folder))}, machine)
    assert plan.offload.kind == "none" and any(one.startswith("auto takes offload none") for one in plan.notes)
    assert any(said in one for one in plan.notes)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_a_group_of_one_has_no_share(kind, data_folder):
    """As many groups as ranks: each would hold all masters, n times what the host has to hold."""
    told = {"offload": "host", "data_parallel": {"kind": kind, "data_parallel_replicate_degree": 2}}
    machine = describe("cpu").model_copy(update={"num_ranks": 2})
    with pytest.raises(SpecError, match=r"2 copies of the whole state.*\n.*data_parallel_replicate_degree lower"):
        Train.read(spec("none", parallelism=told)).plan({"data": facts_of(Artifact.read(data_folder))}, machine)
    told["offload"] = "auto"
    plan = Train.read(spec("none", parallelism=told)).plan({"data": facts_of(Artifact.read(data_folder))}, machine)
    assert plan.offload.kind == "none"


# Memory


def test_a_stage_copies_what_is_no_gpus():
    source = torch.arange(6.0).view(2, 3)
    assert torch.equal(Stage().copy(torch.empty(2, 3), source.bfloat16()), source)
