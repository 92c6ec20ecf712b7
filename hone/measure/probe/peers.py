"""Copies from every GPU to every other: their rate, their least time, and whether the host is in between."""

from __future__ import annotations

import torch

from hone.measure.probe.gpu import timed
from hone.measure.probe.result import PeerPair, Sample

_BYTES, _QUICK_BYTES, _SMALL_BYTES = 256 << 20, 64 << 20, 4096


def peer_pairs(devices: int, *, quick: bool) -> list[PeerPair]:
    """Every ordered pair of the first `devices` CUDA devices; none for one."""
    size = _QUICK_BYTES if quick else _BYTES
    found = []
    buffers = [torch.ones(size, dtype=torch.uint8, device=index) for index in range(devices)] if devices > 1 else []
    targets = [torch.empty_like(one) for one in buffers]
    for source in range(len(buffers)):
        for target in range(len(buffers)):
            if source == target:
                continue
            took = timed(lambda s=source, t=target: targets[t].copy_(buffers[s], non_blocking=True), source)
            assert bool((targets[target][:: 1 << 16] == 1).all()), "the copy arrived"
            small = timed(
                lambda s=source, t=target: targets[t][:_SMALL_BYTES].copy_(
                    buffers[s][:_SMALL_BYTES], non_blocking=True
                ),
                source,
                turns=20,
            )
            found.append(
                PeerPair(
                    source=source,
                    target=target,
                    direct=torch.cuda.can_device_access_peer(source, target),
                    bytes_per_s=Sample.of([size / one for one in took]),
                    latency_s=Sample.of(small),
                )
            )
    return found
