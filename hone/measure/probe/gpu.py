"""The memory hierarchy of a GPU: latency by size, bandwidth by size, and copies inside it and to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from hone.measure.probe.buffers import Buffer
from hone.measure.probe.latency import knee
from hone.measure.probe.result import GpuProbe, LatencyPoint, Level, Sample, SizePoint, Transfer
from hone.measure.probe.threads import on_thread
from hone.measure.topology.pin import address_of, node_of_gpu
from hone.measure.topology.read import Topology

TURNS = 5
_LINE = 128
"""Bytes between two nodes of a chain: a line of four sectors."""
_BLOCK, _SHIFT = 1024, 61
_COPY_BYTES, _QUICK_COPY_BYTES = 256 << 20, 64 << 20
_MOVE_BYTES = 1 << 30
_ONE_LEVEL = 1.15
"""Largest ratio of neighbouring latencies inside a level."""


def timed(work: Callable[[], object], device: int, turns: int = TURNS) -> list[float]:
    """Seconds of each of `turns` calls until the GPU is done, after one call that does not count."""
    found = []
    for turn in range(turns + 1):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        if turn:
            found.append(time.perf_counter() - begun)
    return found


def probe_gpu(index: int, topology: Topology, *, quick: bool) -> tuple[GpuProbe, list[str]]:
    """Everything about one CUDA device, and notes on what was left out."""
    from hone.measure.probe.managed import managed_transfers, unified

    notes: list[str] = []
    found = torch.cuda.get_device_properties(index)
    address = address_of(index)
    node = node_of_gpu(topology, index)
    with torch.cuda.device(index):
        points, sweep, registers = _kernels(index, found.L2_cache_size, quick, notes)
        transfers = [*_inside(index), *_with_host(index, topology, quick)]
        managed, why = (
            ([], "managed memory was not measured: a quick probe leaves it out")
            if quick
            else managed_transfers(index, _QUICK_COPY_BYTES)
        )
        transfers += managed
    notes += [f"GPU {index}: {why}"] if why else []
    levels = gpu_levels(points, sweep, found.L2_cache_size, found.total_memory, registers, transfers)
    probe = GpuProbe(
        index=index,
        name=found.name,
        address=address,
        node=node,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
        unified=unified(index),
        levels=tuple(levels),
        latency=tuple(points),
        sweep=tuple(sweep),
        transfers=tuple(transfers),
    )
    torch.cuda.empty_cache()
    return probe, notes


def _kernels(
    index: int, l2_bytes: int, quick: bool, notes: list[str]
) -> tuple[list[LatencyPoint], list[SizePoint], Sample | None]:
    """What Triton's kernels measure; nothing, with a note, where there is no Triton or it does not know the GPU."""
    try:
        from hone.measure.probe import gpu_kernels  # noqa: F401

        return latency_curve(index, l2_bytes, quick), read_sweep(index, l2_bytes, quick), register_latency(index)
    except (ImportError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        notes.append(
            f"GPU {index}: latency and bandwidth by size were not measured, Triton's kernels do not run: {first}"
        )
        return [], [], None


def gpu_sizes(l2_bytes: int, quick: bool) -> list[int]:
    """Sizes of chains from 4 KiB to four times the second-level cache, two an octave (one when quick), whole lines."""
    found, size, largest = [], 4 << 10, max(4 * l2_bytes, 64 << 20)
    while size <= largest:
        found += [size] if quick else [size, size * 3 // 2]
        size *= 2
    return [one for one in found if one <= largest]


def latency_curve(index: int, l2_bytes: int, quick: bool) -> list[LatencyPoint]:
    """Seconds a dependent load, by the size of the chain: the difference of a long and a short run, without the launch."""
    from hone.measure.probe.gpu_kernels import chase

    sizes = gpu_sizes(l2_bytes, quick)
    words = torch.empty(sizes[-1] // 8, dtype=torch.int64, device=index)
    found = []
    for size in sizes:
        lines = size // _LINE
        order = torch.randperm(lines, device=words.device)
        addresses = words.data_ptr() + order * _LINE
        words[order * (_LINE // 8)] = torch.roll(addresses, -1)
        at = torch.tensor([words.data_ptr()], dtype=torch.int64, device=words.device)
        short, steps = 2000, 2000 + (8000 if quick else 20000)
        chase[(1,)](at, min(2 * lines, 200_000), num_warps=1)  # into the caches

        def run(count: int, at: torch.Tensor = at) -> Callable[[], object]:
            return lambda: chase[(1,)](at, count, num_warps=1)

        long = timed(run(steps), index)
        base = Sample.of(timed(run(short), index)).value
        seconds = Sample.of([max(one - base, 0.0) / (steps - short) for one in long])
        found.append(LatencyPoint(num_bytes=size, seconds=seconds))
    return found


def read_sweep(index: int, l2_bytes: int, quick: bool) -> list[SizePoint]:
    """Bytes per second that all multiprocessors read of a buffer again and again, by its size: from 1 MiB to memory."""
    from hone.measure.probe.gpu_kernels import read

    largest = max(8 * l2_bytes, 256 << 20)
    source = torch.ones(largest // 4, dtype=torch.int32, device=index)
    programs = torch.cuda.get_device_properties(index).multi_processor_count * 8
    out = torch.empty(programs, dtype=torch.int32, device=index)
    found, size = [], 1 << 20
    while size <= largest:
        blocks = size // 4 // _BLOCK
        turns = max(2, (1 << 30) // size)

        def work(blocks: int = blocks, turns: int = turns) -> None:
            read[(programs,)](source, out, blocks, turns, BLOCK=_BLOCK, SHIFT=_SHIFT, num_warps=4)

        took = timed(work, index)
        assert int(out.sum()) == blocks * _BLOCK * turns, "every block is read once a turn"
        found.append(SizePoint(num_bytes=size, bytes_per_s=Sample.of([size * turns / one for one in took])))
        size *= 4 if quick else 2
    return found


def register_latency(index: int) -> Sample:
    """Seconds of one dependent operation on registers of one warp."""
    from hone.measure.probe.gpu_kernels import register_chain

    state = torch.arange(1, 33, dtype=torch.int32, device=index)
    short, rounds = 1000, 41000
    base = Sample.of(timed(lambda: register_chain[(1,)](state, short, LANES=32, num_warps=1), index)).value
    long = timed(lambda: register_chain[(1,)](state, rounds, LANES=32, num_warps=1), index)
    return Sample.of([(one - base) / (rounds - short) / 6 for one in long])


def gpu_levels(
    points: Sequence[LatencyPoint],
    sweep: Sequence[SizePoint],
    l2_bytes: int | None,
    memory_bytes: int,
    registers: Sample | None,
    transfers: Sequence[Transfer],
) -> list[Level]:
    """Registers, L1, L2 and memory of a GPU from its curves.

    The size of the first cache is not told by the driver (it shares its bytes with shared memory): its knee is where the curve first
    rises by more than 15 %.
    """
    levels = (
        [Level(name="GPU registers", device="gpu", latency_s=registers, note="a dependent shift or xor")]
        if registers
        else []
    )
    if not points:
        return levels
    first = _first_level(points)
    l2_end = l2_bytes or points[-1].num_bytes
    l2 = _middle([one for one in points if 2 * first[-1].num_bytes < one.num_bytes <= l2_end // 2])
    memory = _middle([one for one in points if one.num_bytes >= 2 * l2_end]) or points[-1].seconds
    l1 = first[0].seconds
    rates = [one for one in sweep if one.num_bytes <= l2_end // 2]
    l2_rate = max((one.bytes_per_s for one in rates), key=lambda one: one.value, default=None)
    moved = [one.bytes_per_s for one in transfers if one.what == "device read"]
    l1_knee, l2_knee = knee(points, l1, l2), knee(points, l2, memory)
    levels.append(
        Level(
            name="GPU L1",
            device="gpu",
            knee_bytes=l1_knee,
            latency_s=l1,
            note="of one multiprocessor, beside its shared memory",
        )
    )
    levels.append(
        Level(name="GPU L2", device="gpu", size_bytes=l2_bytes, knee_bytes=l2_knee, latency_s=l2, bytes_per_s=l2_rate)
    )
    rate = moved[0] if moved else None
    levels.append(Level(name="GPU memory", device="gpu", size_bytes=memory_bytes, latency_s=memory, bytes_per_s=rate))
    return levels


def _first_level(points: Sequence[LatencyPoint]) -> list[LatencyPoint]:
    """The points before the first rise of more than 15 %."""
    found = [points[0]]
    for before, after in pairwise(points):
        if after.seconds.low > _ONE_LEVEL * before.seconds.low:
            break
        found.append(after)
    return found


def _middle(points: Sequence[LatencyPoint]) -> Sample | None:
    return sorted((one.seconds for one in points), key=lambda one: one.low)[len(points) // 2] if points else None


def _inside(index: int) -> list[Transfer]:
    """Copies and reads inside the GPU's memory, of 1 GiB, or an eighth of a smaller one."""
    free, _ = torch.cuda.mem_get_info(index)
    size = min(_MOVE_BYTES, free // 8) // 4096 * 4096
    source = torch.ones(size // 4, dtype=torch.float32, device=index)
    target = torch.empty_like(source)
    rows = source.view(-1, 1024)

    def several(work: Callable[[], object], times: int = 8) -> Callable[[], object]:
        return lambda: [work() for _ in range(times)]

    copied = timed(several(lambda: target.copy_(source)), index)
    read = timed(several(lambda: rows.sum(1)), index)
    written = timed(several(lambda: target.fill_(1.0)), index)
    rows_of = (("device copy", copied, 2), ("device read", read, 1), ("device write", written, 1))
    return [
        Transfer(
            device=index, what=what, num_bytes=size, bytes_per_s=Sample.of([8 * passes * size / one for one in took])
        )
        for what, took, passes in rows_of
    ]


class Pinned:
    """Host memory of `num_bytes`, touched by a thread on `cpus` and locked for the GPU; `close` unlocks it.

    Not by torch's allocator, which gives blocks of any node again.
    """

    def __init__(self, num_bytes: int, cpus: Sequence[int]) -> None:
        self._buffer = Buffer(num_bytes, huge=False)
        bytes_ = self._buffer.view(np.uint8)
        on_thread(cpus, lambda: bytes_.fill(1))
        code = torch.cuda.cudart().cudaHostRegister(self._buffer.address, num_bytes, 0)
        if int(code):
            raise RuntimeError(f"cudaHostRegister: error {int(code)}")
        self.tensor = torch.from_numpy(bytes_)

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._buffer.address)


def _with_host(index: int, topology: Topology, quick: bool) -> list[Transfer]:
    """Copies to and from the host: pageable, pinned on each NUMA node, and both ways at once."""
    size = _QUICK_COPY_BYTES if quick else _COPY_BYTES
    here = torch.empty(size, dtype=torch.uint8, device=index)
    there = torch.empty_like(here)
    found = []

    def add(what: str, took: Sequence[float], node: int | None, passes: int = 1) -> None:
        rates = Sample.of([passes * size / one for one in took])
        found.append(Transfer(device=index, what=what, num_bytes=size, bytes_per_s=rates, host_node=node))

    pageable = torch.ones(size, dtype=torch.uint8)
    add("host to device, pageable", timed(lambda: here.copy_(pageable), index), None)
    add("device to host, pageable", timed(lambda: pageable.copy_(here), index), None)
    several = len(topology.compute_nodes) > 1
    for node in topology.compute_nodes:
        outward, inward = (Pinned(size, node.cpus) for _ in range(2))
        own = node.id if several else None
        try:
            add("host to device, pinned", timed(lambda o=outward: here.copy_(o.tensor, non_blocking=True), index), own)
            add("device to host, pinned", timed(lambda i=inward: i.tensor.copy_(here, non_blocking=True), index), own)
            add("both ways at once, pinned", _both(index, here, there, outward.tensor, inward.tensor), own, 2)
        finally:
            torch.cuda.synchronize(index)
            outward.close()
            inward.close()
    return found


def _both(
    index: int, here: torch.Tensor, there: torch.Tensor, outward: torch.Tensor, inward: torch.Tensor
) -> list[float]:
    """Seconds of a copy each way at the same time, on a stream each."""
    one, other = (torch.cuda.Stream(index) for _ in range(2))

    def work() -> None:
        with torch.cuda.stream(one):
            here.copy_(outward, non_blocking=True)
        with torch.cuda.stream(other):
            inward.copy_(there, non_blocking=True)

    return timed(work, index)
