"""The probe of the host: chains that are one cycle, levels and knees of known curves, threads, the disk and the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from hone.measure.probe import disk as disk_probe
from hone.measure.probe.bandwidth import loaded, node_pairs, read_by_all, streams
from hone.measure.probe.buffers import Buffer
from hone.measure.probe.disk import probe_disk
from hone.measure.probe.latency import Chain, best_curve, largest_bytes, levels_of, sizes
from hone.measure.probe.result import LatencyPoint, MachineProbe, Sample, keep_probe, probe_path
from hone.measure.probe.run import probe_machine
from hone.measure.probe.threads import counts, in_order, on_thread, together
from hone.measure.topology.read import read_topology
from tests.measure.topology.trees import machine


@pytest.mark.parametrize("lines", [1, 2, 64, 1000])
def test_a_chain_visits_every_line_once(lines: int) -> None:
    chain = Chain(Buffer(64 * lines, huge=False), 64 * lines)
    at, seen = 0, []
    for _ in range(lines):
        seen.append(at)
        at = int(chain.words[at])
    assert at == 0 and sorted(seen) == [8 * line for line in range(lines)]


def test_the_compiled_chain_ends_where_python_ends() -> None:
    from hone.measure.probe import kernels

    chain, at = Chain(Buffer(64 * 100, huge=False), 64 * 100), 0
    for _ in range(12345):
        at = int(chain.words[at])
    assert kernels.chase(chain.words, np.uint64(0), 12345) == at


def test_kernels_compute_what_they_say() -> None:
    from hone.measure.probe import kernels

    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 1001))
    target = np.zeros(1001)
    kernels.triad(target, first, second, 3.0)
    assert np.allclose(target, first + 3.0 * second)
    kernels.copy(target, second)
    assert np.array_equal(target, second)
    values = rng.integers(0, 1000, 777)
    assert kernels.read(values, 1) == values.sum()
    state = 88172645463325252
    for _ in range(10):  # Marsaglia 2003, in exact arithmetic
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
    assert kernels.register_chain(np.uint64(88172645463325252), 10) == state


def curve(steps: dict[int, float], last: int) -> list[LatencyPoint]:
    """A curve of sharp steps: the latency of sizes up to each key."""
    points = []
    for size in sizes(last):
        seconds = next((value for end, value in steps.items() if size <= end), [*steps.values()][-1])
        points.append(LatencyPoint(num_bytes=size, seconds=Sample(value=seconds, low=seconds, high=seconds, n=5)))
    return points


def test_levels_and_knees_of_a_known_curve(tmp_path: Path) -> None:
    topology = read_topology(machine(tmp_path, [range(4)]), allowed=range(4))
    points = curve({32 << 10: 1e-9, 1 << 20: 4e-9, 32 << 20: 20e-9, 1 << 40: 90e-9}, 128 << 20)
    levels = levels_of(topology, points, 64 << 30)
    assert [level.name for level in levels] == ["L1", "L2", "L3", "memory"]
    assert [level.latency_s.value for level in levels if level.latency_s] == [1e-9, 4e-9, 20e-9, 90e-9]
    for level in levels[:3]:  # between the last size inside and the next one, half an octave on
        assert level.size_bytes and level.knee_bytes and 1 <= level.knee_bytes / level.size_bytes <= 1.5
    assert levels[3].knee_bytes is None and levels[2].note == "shared by 4 logical processors"


def test_a_cache_that_does_not_show_is_said(tmp_path: Path) -> None:
    topology = read_topology(machine(tmp_path, [range(4)]), allowed=range(4))
    levels = levels_of(topology, curve({32 << 10: 1e-9, 1 << 20: 4e-9, 1 << 40: 90e-9}, 128 << 20), None)
    assert levels[2].knee_bytes is None and "no faster than memory here" in levels[2].note


def test_large_pages_count_where_they_are() -> None:
    one = Sample(value=1, low=1, high=1, n=1)
    points = [LatencyPoint(num_bytes=size, seconds=one, huge_pages=huge) for huge in (False, True) for size in (1, 2)]
    assert [(point.num_bytes, point.huge_pages) for point in best_curve(points[:3])] == [(1, True), (2, False)]


def test_sizes_are_whole_lines_and_reach_the_largest(tmp_path: Path) -> None:
    topology = read_topology(machine(tmp_path, [range(2)]), allowed=range(2))
    assert largest_bytes(topology, 64 << 30) == 128 << 20 and largest_bytes(topology, 256 << 20) == 32 << 20
    found = sizes(100_000_000)
    assert found[0] == 4096 and found == sorted(set(found)) and all(size % 64 == 0 for size in found)
    assert found[-1] == 100_000_000 // 64 * 64


def test_threads_bind_themselves_and_the_caller_stays_free() -> None:
    own = os.sched_getaffinity(0)
    cpu = max(own)
    assert on_thread(cpu, lambda: os.sched_getaffinity(0)) == {cpu}
    made: list[set[int]] = []
    took = together([cpu], lambda _: made.append(os.sched_getaffinity(0)), lambda _: None, 3)
    assert made == [{cpu}] and len(took) == 3 and os.sched_getaffinity(0) == own


def test_an_error_of_a_thread_is_raised_and_no_thread_waits() -> None:
    def prepare(place: int) -> None:
        if place:
            raise MemoryError("no buffer")

    cpu = min(os.sched_getaffinity(0))
    with pytest.raises(MemoryError, match="no buffer"):
        together([cpu, cpu], prepare, lambda _: None, 2)
    with pytest.raises(KeyError):
        on_thread(cpu, lambda: {}["x"])


def test_the_order_of_processors_takes_cores_before_their_second_threads(tmp_path: Path) -> None:
    topology = read_topology(machine(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]], siblings=2), allowed=range(8))
    assert in_order(topology) == [0, 2, 4, 6, 1, 3, 5, 7] and in_order(topology, (4, 5)) == [4, 5]
    assert counts(6) == [1, 2, 4, 6] and counts(1) == [1] and counts(8) == [1, 2, 4, 8]


def test_streams_and_traffic_have_positive_rates() -> None:
    topology = read_topology()
    found = streams(topology, 1 << 20, quick=True)
    assert {point.kernel for point in found} == {"copy", "triad"} and all(point.bytes_per_s.low > 0 for point in found)
    assert {point.threads for point in found} == {1, topology.num_usable}
    assert read_by_all(topology.cpus[:1], 1 << 20).n == 5
    beside = loaded(topology.model_copy(update={"caches": ()}), 1 << 30, quick=True)
    assert beside[0].threads == 0 and beside[0].bytes_per_s == 0 and all(point.latency_s.value > 0 for point in beside)
    assert all(point.bytes_per_s > 0 for point in beside[1:])
    assert node_pairs(topology, 1 << 30, quick=True) == ([], []) or len(topology.nodes) > 1


def test_pairs_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's processors under the names of two nodes: the work is real, its placement is not, which is said where pages are asked."""
    from hone.measure.topology import policy

    monkeypatch.setattr(policy, "nodes_of_pages", lambda *_: None)
    cpus = sorted(os.sched_getaffinity(0))
    root = machine(tmp_path, [cpus, [], []], memory_gib=[1, 0, 1])
    topology = read_topology(root, allowed=cpus)
    two = topology.model_copy(update={"nodes": (topology.nodes[0], topology.nodes[0].model_copy(update={"id": 1}))})
    found, notes = node_pairs(two, 64 << 20, quick=True)
    assert [(pair.cpu_node, pair.memory_node) for pair in found] == [(0, 0), (1, 0), (0, 1), (1, 1)] and notes == []
    monkeypatch.setattr(policy, "nodes_of_pages", lambda *_: {0: 256})
    found, notes = node_pairs(two, 64 << 20, quick=True)
    assert [(pair.cpu_node, pair.memory_node) for pair in found] == [(0, 0), (1, 0)]
    assert notes == ["node 1 was left out: pages meant for it are on nodes [0]"]
    _, notes = node_pairs(topology, 64 << 20, quick=True)
    assert len(notes) == 1 and notes[0].startswith("node 2 has no processors and was left out"), notes


def test_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    found, why = probe_disk(tmp_path, 4 << 20, turns=2)
    assert not why and found is not None and found.write_bytes_per_s and found.read_bytes_per_s
    assert found.read_latency_s and found.read_latency_s.low > 0 and [*tmp_path.iterdir()] == []


def test_a_disk_without_direct_access_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_probe.os, "open", refuse)
    found, why = probe_disk(tmp_path, 2 << 20, turns=1)
    assert found is not None and not found.direct and not why


def test_a_full_disk_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_probe.os, "writev", full)
    found, why = probe_disk(tmp_path, 2 << 20, turns=1)
    assert found is None and "No space left" in why and [*tmp_path.iterdir()] == []


def test_a_probe_without_time_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    from hone.measure.probe import latency

    monkeypatch.setattr(latency, "largest_bytes", lambda *_: 1 << 16)
    said: list[str] = []
    probe = probe_machine(quick=True, gpus=False, say=said.append, limit_s=0.0)
    assert probe.disk is None and probe.streams == () and probe.latency == ()
    assert any(note.startswith("disk: not measured") for note in probe.notes)
    assert [*tmp_path.iterdir()] == []


def test_the_file_of_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    topology = read_topology()
    probe = MachineProbe(made_at="2026-01-01T00:00:00+00:00", seconds=1, quick=True, processor="x", topology=topology)
    path = keep_probe(probe)
    assert path == probe_path("x", topology) and path.parent == tmp_path / "cache/hone"
    assert MachineProbe.model_validate_json(path.read_text()) == probe
    assert probe_path("x", topology.model_copy(update={"cpus": (0, 99)})) != path
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be stored"):
        assert keep_probe(probe) is None
