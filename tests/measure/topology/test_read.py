"""The reader of topologies on trees of machines that are not here, and on this one against psutil and lscpu's facts."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from hone.measure.topology.limits import memory_limit, numbers, processor_quota
from hone.measure.topology.read import read_topology
from tests.measure.topology.trees import machine, put

H100, NIC, BMC = ("0x030200", "0x10de", 1), ("0x020700", "0x15b3", 0), ("0x030000", "0x1a03", -1)


def test_one_node(tmp_path: Path) -> None:
    found = read_topology(machine(tmp_path, [range(8)], siblings=2), allowed=range(8))
    assert len(found.nodes) == 1 and found.nodes[0].cpus == tuple(range(8)) and found.nodes[0].memory_bytes == 64 << 30
    assert found.cores == ((0, 1), (2, 3), (4, 5), (6, 7)) and found.sockets == (tuple(range(8)),)
    assert [(one.level, one.size_bytes) for one in found.cache_levels(3)] == [
        (1, 32 << 10),
        (2, 1 << 20),
        (3, 32 << 20),
    ]
    assert found.cache_levels(3)[0].cpus == (2, 3), "instruction caches are left out, data caches are per core"
    assert found.num_usable == 8 and found.quota is None and found.memory_limit_bytes is None


def test_two_sockets_of_two_nodes(tmp_path: Path) -> None:
    nodes = [range(4), range(4, 8), range(8, 12), range(12, 16)]
    devices = {
        "0000:17:00.0": H100,
        "0000:31:00.0": NIC,
        "0000:05:00.0": BMC,
        "0001:17:00.0": ("0x010802", "0x144d", -1),
    }
    root = machine(tmp_path, nodes, sockets=[range(8), range(8, 16)], l3=[[0, 1], [2, 3], *nodes[1:]], devices=devices)
    found = read_topology(root, allowed=range(16))
    assert [node.cpus for node in found.nodes] == [tuple(one) for one in nodes]
    assert found.nodes[2].distances == (21, 21, 10, 21) and found.sockets == (tuple(range(8)), tuple(range(8, 16)))
    assert found.core_complexes(found.nodes[0]) == ((0, 1), (2, 3)) and found.core_complexes(found.nodes[1]) == (
        (4, 5, 6, 7),
    )
    kinds = {one.address: (one.kind, one.vendor, one.node) for one in found.devices}
    assert kinds["0000:17:00.0"] == ("gpu", "NVIDIA", 1) and kinds["0000:31:00.0"] == ("network", "0x15b3", 0)
    assert kinds["0001:17:00.0"] == ("disk", "0x144d", None), "-1 is not told, not node -1"
    assert "0000:05:00.0" not in kinds, "the display of a server's management chip is no GPU"
    assert [node.id for node in found.nodes if 13 in node.cpus] == [3]


def test_a_node_of_memory_alone_has_no_processors(tmp_path: Path) -> None:
    found = read_topology(machine(tmp_path, [range(4), []], memory_gib=[64, 256]), allowed=range(4))
    assert [len(node.cpus) for node in found.nodes] == [4, 0] and found.nodes[1].memory_bytes == 256 << 30
    assert [node.id for node in found.compute_nodes] == [0]


def test_a_container_sees_only_what_it_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, [range(8), range(8, 16)])
    put(root, "proc/self/cgroup", "0::/pods/one")
    put(root, "proc/self/status", "Name:\tpython\nMems_allowed:\t1\nMems_allowed_list:\t0")
    put(root, "sys/fs/cgroup/pods/cpu.max", "150000 100000")
    put(root, "sys/fs/cgroup/pods/one/cpu.max", "max 100000")
    put(root, "sys/fs/cgroup/pods/one/memory.max", 4 << 30)
    put(root, "sys/fs/cgroup/pods/memory.max", 2 << 30)
    found = read_topology(root, allowed=[2, 3, 4, 5])
    assert found.cpus == (2, 3, 4, 5) and found.nodes[0].cpus == (2, 3, 4, 5)
    assert [(node.id, node.cpus, node.allowed) for node in found.nodes] == [(0, (2, 3, 4, 5), True), (1, (), False)]
    assert found.quota == 1.5 and found.num_usable == 1, "the limit of a cgroup above counts, too"
    assert found.memory_limit_bytes == 2 << 30


def test_limits_of_the_first_version_of_cgroups(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/one\n5:memory:/one")
    put(tmp_path, "sys/fs/cgroup/cpu/one/cpu.cfs_quota_us", 250000)
    put(tmp_path, "sys/fs/cgroup/cpu/one/cpu.cfs_period_us", 100000)
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1)
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    assert processor_quota(tmp_path) == 2.5 and memory_limit(tmp_path) is None
    put(tmp_path, "sys/fs/cgroup/memory/one/memory.limit_in_bytes", 1 << 30)
    assert memory_limit(tmp_path) == 1 << 30


def test_a_system_without_these_files_is_one_node(tmp_path: Path) -> None:
    found = read_topology(tmp_path, allowed=range(4))
    assert len(found.nodes) == 1 and found.nodes[0].cpus == (0, 1, 2, 3) and found.nodes[0].memory_bytes is None
    assert (
        found.caches == ()
        and found.cores == ((0,), (1,), (2,), (3,))
        and found.core_complexes(found.nodes[0]) == ((0, 1, 2, 3),)
    )


@pytest.mark.parametrize(
    ("text", "wanted"), [("", ()), ("0", (0,)), ("0-3,8\n", (0, 1, 2, 3, 8)), ("2,4-5", (2, 4, 5))]
)
def test_lists_of_the_kernel(text: str, wanted: tuple[int, ...]) -> None:
    assert numbers(text) == wanted


def test_this_machine() -> None:
    found = read_topology()
    assert set(found.cpus) == os.sched_getaffinity(0)
    assert {cpu for node in found.nodes for cpu in node.cpus} == set(found.cpus)
    assert {cpu for core in found.cores for cpu in core} == set(found.cpus)
    assert 1 <= len(found.cores) <= (psutil.cpu_count(logical=False) or len(found.cores))
    sizes = [one.size_bytes for one in found.cache_levels()]
    assert sizes == sorted(sizes), "caches grow with their level"
