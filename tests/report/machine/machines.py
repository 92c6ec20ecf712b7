"""Writes the files of a machine that is not here: two sockets, a node of memory alone, two GPUs; what the report is tested and looked at with."""

from __future__ import annotations

from pathlib import Path

from hone.measure.calibration import AttentionRate, Bandwidth, Calibration, KernelRate, MatmulRate
from hone.measure.probe.result import (
    DiskRates,
    GpuProbe,
    LatencyPoint,
    Level,
    LoadedPoint,
    MachineProbe,
    NodePair,
    PeerPair,
    Sample,
    SizePoint,
    StreamPoint,
    Transfer,
    keep_probe,
)
from hone.measure.topology.read import Cache, Device, Node, Topology

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def of(value: float) -> Sample:
    """A sample with a little spread."""
    return Sample(value=value, low=0.97 * value, high=1.08 * value, n=5)


def topology() -> Topology:
    """Two sockets of 8 cores with a GPU each, and a node of memory alone."""
    cpus = tuple(range(16))
    nodes = (
        Node(id=0, cpus=cpus[:8], memory_bytes=256 * GIB, distances=(10, 21, 24)),
        Node(id=1, cpus=cpus[8:], memory_bytes=256 * GIB, distances=(21, 10, 28)),
        Node(id=2, cpus=(), memory_bytes=512 * GIB, distances=(24, 28, 10)),
    )
    caches = [Cache(level=1, size_bytes=32 * KIB, line_bytes=64, cpus=(cpu,)) for cpu in cpus]
    caches += [Cache(level=2, size_bytes=MIB, line_bytes=64, cpus=(cpu,)) for cpu in cpus]
    caches += [Cache(level=3, size_bytes=32 * MIB, line_bytes=64, cpus=node.cpus) for node in nodes[:2]]
    devices = (
        Device(address="0000:17:00.0", kind="gpu", vendor="NVIDIA", node=0),
        Device(address="0000:9a:00.0", kind="gpu", vendor="NVIDIA", node=1),
        Device(address="0000:31:00.0", kind="network", vendor="0x15b3", node=None),
    )
    return Topology(
        nodes=nodes,
        cpus=cpus,
        cores=tuple((cpu,) for cpu in cpus),
        sockets=(cpus[:8], cpus[8:]),
        caches=tuple(caches),
        devices=devices,
        quota=12.0,
        memory_limit_bytes=400 * GIB,
        governor="powersave",
    )


def _latency(size: int, ends: list[tuple[int, float]], last: float) -> Sample:
    return of(next((seconds for end, seconds in ends if size <= end), last))


def probe() -> MachineProbe:
    """A whole probe with every part."""
    sizes = [4 * KIB << power for power in range(16)]
    host, gpu = [(32 * KIB, 1.1e-9), (MIB, 4e-9), (32 * MIB, 19e-9)], [(192 * KIB, 20e-9), (50 * MIB, 140e-9)]
    latency = [LatencyPoint(num_bytes=size, seconds=_latency(size, host, 98e-9)) for size in sizes]
    latency += [
        LatencyPoint(num_bytes=p.num_bytes, seconds=of(0.9 * p.seconds.value), huge_pages=True) for p in latency[8:]
    ]
    bandwidth = [SizePoint(num_bytes=size, bytes_per_s=of(1.2e11 / (1 + index))) for index, size in enumerate(sizes)]
    levels = (
        Level(name="registers", device="host", latency_s=of(0.33e-9), note="a dependent shift or xor"),
        Level(
            name="L1",
            device="host",
            size_bytes=32 * KIB,
            knee_bytes=37 * KIB,
            latency_s=of(1.1e-9),
            bytes_per_s=of(2.1e12),
        ),
        Level(name="L2", device="host", size_bytes=MIB, knee_bytes=MIB + 7, latency_s=of(4e-9), bytes_per_s=of(1.1e12)),
        Level(
            name="L3",
            device="host",
            size_bytes=32 * MIB,
            latency_s=of(19e-9),
            bytes_per_s=of(5e11),
            note="shared <by> 8",
        ),
        Level(name="memory", device="host", size_bytes=GIB << 10, latency_s=of(98e-9), bytes_per_s=of(3e11)),
        Level(name="disk", device="host", latency_s=None, bytes_per_s=of(6e9)),
    )
    pairs = [
        NodePair(
            cpu_node=cpu,
            memory_node=memory,
            bytes_per_s=of(1.5e11 if cpu == memory else 6e10),
            latency_s=of(9e-8 if cpu == memory else 1.5e-7),
        )
        for cpu in (0, 1)
        for memory in (0, 1, 2)
    ]
    return MachineProbe(
        made_at="2026-01-02T03:04:05+00:00",
        seconds=31.4,
        quick=False,
        processor="Example <CPU> 9000",
        topology=topology(),
        levels=levels,
        latency=tuple(latency),
        bandwidth=tuple(bandwidth),
        streams=tuple(
            StreamPoint(kernel=kernel, threads=n, bytes_per_s=of(2.4e10 * n**0.7))
            for n in (1, 2, 4, 8, 16)
            for kernel in ("copy", "triad")
        ),
        pairs=tuple(pairs),
        loaded=tuple(
            LoadedPoint(threads=n, bytes_per_s=2e10 * n, latency_s=of(9e-8 * (1 + n / 8))) for n in (0, 1, 2, 4, 8, 15)
        ),
        disk=DiskRates(
            folder="/data",
            direct=True,
            file_bytes=MIB,
            write_bytes_per_s=of(3e9),
            read_bytes_per_s=of(6e9),
            read_latency_s=None,
        ),
        gpus=tuple(_gpu(index, sizes, gpu) for index in (0, 1)),
        peers=tuple(
            PeerPair(source=a, target=1 - a, direct=a == 0, bytes_per_s=of(3.6e11), latency_s=of(1.2e-5))
            for a in (0, 1)
        ),
        notes=("the disk <is> shared",),
    )


def _gpu(index: int, sizes: list[int], ends: list[tuple[int, float]]) -> GpuProbe:
    moved = {
        "host to device, pinned": 5.5e10,
        "device to host, pinned": 5.3e10,
        "device read": 3e12,
        "managed memory, by page faults": 9e9,
    }
    levels = [Level(name="GPU L2", device="gpu", size_bytes=50 * MIB, latency_s=of(140e-9), bytes_per_s=of(6e12))]
    levels += [Level(name="GPU memory", device="gpu", size_bytes=80 * GIB, latency_s=of(350e-9), bytes_per_s=of(3e12))]
    return GpuProbe(
        index=index,
        name="Example GPU",
        address="0000:17:00.0",
        node=index,
        l2_bytes=50 * MIB,
        memory_bytes=80 * GIB,
        levels=tuple(levels),
        latency=tuple(LatencyPoint(num_bytes=size, seconds=_latency(size, ends, 350e-9)) for size in sizes),
        sweep=tuple(SizePoint(num_bytes=size, bytes_per_s=of(6e12 if size < 50 * MIB else 3e12)) for size in sizes[8:]),
        transfers=tuple(
            Transfer(device=index, what=what, num_bytes=MIB, bytes_per_s=of(rate), host_node=index)
            for what, rate in moved.items()
        ),
    )


def calibration() -> Calibration:
    """Rates of the GPU: a memory-bound and a compute-bound product in two dtypes, attention, kernels."""
    rates = [
        MatmulRate(dtype=dtype, m=m, n=4096, k=4096, flops_per_s=rate, layout=layout)
        for dtype, scale in (("bfloat16", 1.0), ("float32", 0.1))
        for m, rate, layout in (
            (1, 2.4e12 * scale, "forward"),
            (256, 3e14 * scale, "forward"),
            (4096, 7e14 * scale, "weight_gradient"),
        )
    ]
    return Calibration(
        device="Example GPU",
        threads=1,
        torch="2",
        read_bytes_per_s=3e12,
        copies=(Bandwidth(num_bytes=GIB, bytes_per_s=2.8e12),),
        matmuls=tuple(rates),
        attentions=(AttentionRate(dtype="bfloat16", seq_len=4096, forward_flops_per_s=5e14, train_flops_per_s=1.5e14),),
        kernels=(KernelRate(kernel="rms_norm", dtype="bfloat16", bytes_per_s=2.6e12),),
        op_s=4e-6,
        exp_per_s=1e12,
        busy={"float32": "other <work> ran"},
    )


def write(folder: Path) -> Path:
    """Both files in `folder`."""
    keep_probe(probe(), folder / "probe.json")
    (folder / "calibration.json").write_text(calibration().model_dump_json(), encoding="utf8")
    return folder
