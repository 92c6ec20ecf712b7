"""The plan of placement on machines that are not here, and real binding in children of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hone.base.errors import SpecError
from hone.measure.topology import pin
from hone.measure.topology.pin import asked, spread_layers
from hone.measure.topology.placement import BINDINGS, ONE_NODE, Share, assign, nodes_of_layers
from hone.measure.topology.read import Topology, read_topology
from tests.measure.topology.trees import machine, put


@pytest.fixture
def four(tmp_path: Path) -> Topology:
    """Two sockets of two nodes of four cores of two threads; two last caches a node."""
    nodes = [range(8 * node, 8 * node + 8) for node in range(4)]
    complexes = [range(4 * one, 4 * one + 4) for one in range(8)]
    return read_topology(
        machine(tmp_path, nodes, sockets=[range(16), range(16, 32)], siblings=2, l3=complexes), allowed=range(32)
    )


def test_auto_spreads_workers_over_nodes_and_divides_their_cores(four: Topology) -> None:
    found = assign(four, 8)
    assert [share.node for share in found.shares if share] == [0, 1, 2, 3, 0, 1, 2, 3] and found.why == ""
    assert found.shares[0] == Share((0, 1, 2, 3), 0, 2) and found.shares[4] == Share((4, 5, 6, 7), 0, 2)
    used = [cpu for share in found.shares if share for cpu in share.cpus]
    assert sorted(used) == list(range(32)), "each core is one worker's, and none is left over"


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 7, 16, 40])
@pytest.mark.parametrize("binding", [one for one in BINDINGS if one != "none"])
def test_every_plan_is_sound(four: Topology, processes: int, binding: str) -> None:
    found = assign(four, processes, binding)  # type: ignore[arg-type]
    assert len(found.shares) == processes
    shares = [share for share in found.shares if share is not None]
    for share in shares:
        node = next(node for node in four.nodes if node.id == share.node)
        assert share.cpus and set(share.cpus) <= set(four.cpus) and set(share.cpus) & set(node.cpus)
        cores = {core for core in four.cores if set(core) & set(share.cpus)}
        assert all(set(core) <= set(share.cpus) for core in cores), "threads of a core stay together"
        assert 1 <= share.threads <= len(cores)
    counts = [sum(share.node == node for share in shares) for node in range(4)]
    assert not shares or max(counts) - min(counts) <= 1
    if binding == "exclusive" and processes <= 16:
        used = [cpu for share in shares for cpu in share.cpus]
        assert len(used) == len(set(used)), "no two workers share a core"
    for core in four.cores:  # threads never outnumber the cores, but where processes do
        on_it = [share for share in shares if set(core) & set(share.cpus)]
        assert (
            sum(share.threads / (len(share.cpus) / 2) for share in on_it)
            <= max(1, len(on_it) if processes > 16 else 1) + 1e-9
        )


def test_ranks_are_on_their_gpus_nodes(four: Topology) -> None:
    found = assign(four, 4, near=[2, 2, 3, None])
    assert [share and (share.node, share.cpus[0], len(share.cpus), share.threads) for share in found.shares] == [
        (2, 16, 8, 2),
        (2, 16, 8, 2),
        (3, 24, 8, 2),
        (3, 24, 8, 2),
    ]
    exclusive = assign(four, 2, "exclusive", near=[2, 2])
    assert [share and share.cpus for share in exclusive.shares] == [(16, 17, 18, 19), (20, 21, 22, 23)]
    assert assign(four, 1, near=[9]).shares[0] == assign(four, 1, "node").shares[0], "a node that is not there"


def test_sockets_and_core_complexes(four: Topology) -> None:
    assert [share and share.cpus for share in assign(four, 3, "socket").shares] == [
        tuple(range(16)),
        tuple(range(16)),
        tuple(range(16, 32)),
    ]
    complexes = assign(four, 5, "core-complex").shares
    assert [share and share.cpus for share in complexes] == [
        (0, 1, 2, 3),
        (8, 9, 10, 11),
        (16, 17, 18, 19),
        (24, 25, 26, 27),
        (4, 5, 6, 7),
    ]


def test_a_reserved_processor_is_left_to_the_thread_that_launches(four: Topology) -> None:
    found = assign(four, 4, reserved=[0, 1])
    assert found.shares[0] and found.shares[0].cpus == (2, 3, 4, 5, 6, 7)
    alone = assign(four, 1, "core-complex", reserved=range(32)).shares[0]
    assert alone and alone.cpus == (0, 1, 2, 3), "where nothing else is there it is shared"


def test_one_node_says_so(tmp_path: Path) -> None:
    one = read_topology(machine(tmp_path, [range(4), []], memory_gib=[64, 256]), allowed=range(4))
    for binding in ("auto", "node", "socket"):
        found = assign(one, 2, binding)  # type: ignore[arg-type]
        assert found.shares == (None, None) and found.why == ONE_NODE
    assert assign(one, 2, "none").why == ""
    exclusive = assign(one, 2, "exclusive")
    assert [share and share.cpus for share in exclusive.shares] == [(0, 1), (2, 3)], "cores can be divided all the same"


def test_more_workers_than_cores_share_and_it_is_said(tmp_path: Path) -> None:
    one = read_topology(machine(tmp_path, [range(2)]), allowed=range(2))
    found = assign(one, 3, "exclusive")
    assert [share and share.cpus for share in found.shares] == [
        (0,),
        (1,),
        (0,),
    ] and "more processes than cores" in found.why


def test_a_quota_caps_threads_and_a_container_its_processors(tmp_path: Path) -> None:
    root = machine(tmp_path, [range(8), range(8, 16)])
    put(root, "sys/fs/cgroup/cpu.max", "400000 100000")
    found = assign(read_topology(root, allowed=[0, 1, 2, 9, 10]), 2)
    assert found.shares == (Share((0, 1, 2), 0, 2), Share((9, 10), 1, 2))


def test_layers_go_round_the_nodes(four: Topology) -> None:
    assert nodes_of_layers(four, 6) == [0, 1, 2, 3, 0, 1]
    hidden = four.model_copy(
        update={"nodes": tuple(node.model_copy(update={"allowed": node.id != 1}) for node in four.nodes)}
    )
    assert nodes_of_layers(hidden, 4) == [0, 2, 3, 0]


def test_spreading_layers_moves_their_storages_or_says_why_not(four: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(5))
    moved: list[int] = []

    def place(ranges: list[tuple[int, int]], node: int, *, strict: bool) -> str:
        assert sum(size for _, size in ranges) == 4 * (64 * 64 + 64) and not strict
        moved.append(node)
        return ""

    monkeypatch.setattr(pin, "bound_pages", place)
    assert spread_layers(layers, four) == "layer i is on NUMA node i mod 4" and moved == [0, 1, 2, 3, 0]
    monkeypatch.setattr(pin, "bound_pages", lambda *_, **__: "mbind: Operation not permitted")
    assert "stay where they were loaded: mbind: Operation not permitted; tensor_parallel_size=4" in spread_layers(
        layers, four
    )
    one = four.model_copy(update={"nodes": four.nodes[:1]})
    assert spread_layers(layers, one) == ""


def test_the_environment_names_the_binding() -> None:
    assert asked({}) == "auto" and asked({pin.SETTING: "core-complex"}) == "core-complex"
    with pytest.raises(SpecError, match="HONE_NUMA_BINDING=nodes") as caught:
        asked({pin.SETTING: "nodes"})
    assert "exclusive" in caught.value.fix


def test_ranges() -> None:
    assert [pin._ranges(one) for one in ([0], [0, 1, 2], [0, 2, 3, 7, 8, 9], [])] == ["0", "0-2", "0,2-3,7-9", ""]


def test_a_child_is_bound_with_all_its_threads_and_freed_again() -> None:
    code = (
        "import os, threading, torch\n"
        "from hone.measure.topology.pin import bind\n"
        "from hone.measure.topology.placement import Share\n"
        "wait, seen = threading.Event(), []\n"
        "def other(): wait.wait(); seen.append(os.sched_getaffinity(0))\n"
        "thread = threading.Thread(target=other); thread.start()\n"
        "before, threads, cpu = os.sched_getaffinity(0), torch.get_num_threads(), max(os.sched_getaffinity(0))\n"
        "bound = bind(Share((cpu,), 0, 1))\n"
        "later = []; fresh = threading.Thread(target=lambda: later.append(os.sched_getaffinity(0))); fresh.start(); fresh.join()\n"
        "wait.set(); thread.join()\n"
        "assert os.sched_getaffinity(0) == {cpu} == seen[0] == later[0] and torch.get_num_threads() == 1, (seen, later)\n"
        "assert f'bound to processors {cpu}' in bound.said, bound.said\n"
        "bound.undo()\n"
        "assert os.sched_getaffinity(0) == before and torch.get_num_threads() == threads\n"
        "assert bind(None).said == ''\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
