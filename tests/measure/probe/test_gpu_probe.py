"""The probe of GPUs: its kernels compile for Hopper to what they are meant to be; levels of known curves; and the whole on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from hone.measure.probe.gpu import gpu_levels, gpu_sizes
from hone.measure.probe.result import LatencyPoint, Sample, SizePoint, Transfer
from hone.measure.topology.read import read_topology

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def of(value: float) -> Sample:
    return Sample(value=value, low=value, high=value, n=5)


@pytest.mark.slow
def test_the_chain_is_one_load_after_the_other_on_hopper() -> None:
    pytest.importorskip("triton")
    from hone.measure.probe.gpu_kernels import chase
    from tests.ops.compiled import compile_triton

    made = compile_triton(chase, {"at_ptr": "*i64", "steps": "i32"}, {}, num_warps=1)
    assert made.clean and made.shared == 0
    loads = [text for text in made.instructions if text.startswith("LDG")]
    assert loads and all(".64" in text for text in loads), loads
    assert not any("STRONG" in text or ".NA" in text for text in loads), "the loads pass the first cache"
    assert made.count("BAR") == 0 and made.count("IMAD.WIDE") == 0, "no address is computed between two loads"
    cleared = re.findall(r"mov\.u64 \s*(%rd\d+), 0x0;\s*ld\.global\S* \{ (%rd\d+) \}, \[ (%rd\d+) ", made.ptx)
    assert all(result != address for _, result, address in cleared), "an address is cleared before it is read"
    assert re.search(r"ld\.global\.b64 (%rd\d+), \[\1\];|ld\.global\.b64 (%rd\d+), \[%rd\d+\];", made.ptx)


@pytest.mark.slow
def test_the_reads_are_wide_and_stay_in_the_loop_on_hopper() -> None:
    pytest.importorskip("triton")
    from hone.measure.probe.gpu_kernels import read
    from tests.ops.compiled import compile_triton

    signature = {"source_ptr": "*i32", "out_ptr": "*i32", "blocks": "i32", "turns": "i32"}
    made = compile_triton(read, signature, {"BLOCK": 1024, "SHIFT": 61}, num_warps=4)
    assert made.clean and made.count("LDG.E.128") >= 1


@pytest.mark.slow
def test_the_register_chain_keeps_its_operations_on_hopper() -> None:
    pytest.importorskip("triton")
    from hone.measure.probe.gpu_kernels import register_chain
    from tests.ops.compiled import compile_triton

    made = compile_triton(register_chain, {"state_ptr": "*i32", "rounds": "i32"}, {"LANES": 32}, num_warps=1)
    assert made.clean and made.count("LOP3") >= 3 and made.count("SHF") + made.count("IMAD.SHL") >= 3


def test_levels_of_a_known_gpu() -> None:
    """32 ns up to 192 KiB, 200 ns up to 50 MiB, 500 ns beyond: the shape that papers measure on Hopper."""
    l2 = 50 << 20
    points = [
        LatencyPoint(num_bytes=size, seconds=of(32e-9 if size <= 192 << 10 else 200e-9 if size <= l2 else 500e-9))
        for size in gpu_sizes(l2, quick=False)
    ]
    sweep = [
        SizePoint(num_bytes=size << 20, bytes_per_s=of(rate)) for size, rate in ((1, 2e12), (16, 6e12), (64, 4e12))
    ]
    read = Transfer(device=0, what="device read", num_bytes=1 << 30, bytes_per_s=of(3e12))
    found = {level.name: level for level in gpu_levels(points, sweep, l2, 80 << 30, of(2e-9), [read])}
    assert [*found] == ["GPU registers", "GPU L1", "GPU L2", "GPU memory"]
    assert [level.latency_s.value for level in found.values() if level.latency_s] == [2e-9, 32e-9, 200e-9, 500e-9]
    assert found["GPU L1"].knee_bytes and 192 << 10 <= found["GPU L1"].knee_bytes <= 256 << 10
    assert found["GPU L2"].knee_bytes and l2 * 0.9 <= found["GPU L2"].knee_bytes <= 1.5 * l2
    assert found["GPU L2"].bytes_per_s == of(6e12) and found["GPU memory"].bytes_per_s == of(3e12)
    assert gpu_levels([], [], None, 1, None, []) == []


def test_sizes_of_chains_are_whole_lines() -> None:
    found = gpu_sizes(50 << 20, quick=True)
    assert found[0] == 4096 and all(size % 128 == 0 for size in found) and found == sorted(found)
    assert 100 << 20 < found[-1] <= 200 << 20


@pytest.mark.gpu
@needs_gpu
def test_a_gpu() -> None:
    from hone.measure.probe.gpu import probe_gpu

    probe, notes = probe_gpu(0, read_topology(), quick=True)
    latencies = [level.latency_s.value for level in probe.levels if level.latency_s]
    assert len(probe.levels) == 4 and latencies == sorted(latencies), notes
    rates = {one.what: one.bytes_per_s.value for one in probe.transfers}
    assert rates["host to device, pinned"] > rates["host to device, pageable"] * 0.8
    assert rates["device read"] > 10 * rates["host to device, pinned"] or probe.unified
    assert "managed memory, by page faults" in rates or any("managed" in note for note in notes)


@pytest.mark.gpu
@needs_gpu
def test_managed_memory_is_what_the_host_wrote() -> None:
    from hone.measure.probe.managed import Managed

    memory = Managed(1 << 20, 0)
    memory.host.view("float32")[:] = 2.0
    assert float(memory.tensor.sum()) == 2.0 * (1 << 18)
    memory.prefetch(to_device=True)
    assert float(memory.tensor.sum()) == 2.0 * (1 << 18)
    memory.close()


@pytest.mark.gpu
@needs_gpu
def test_copies_between_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    from hone.measure.probe.peers import peer_pairs

    found = peer_pairs(2, quick=True)
    assert [(pair.source, pair.target) for pair in found] == [(0, 1), (1, 0)]
    assert all(pair.bytes_per_s.value > 1e9 and pair.latency_s.value < 1e-2 for pair in found)
