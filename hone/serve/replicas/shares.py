"""What each data-parallel replica gets of one machine: its GPUs, or its part of a CPU's memory and threads."""

from __future__ import annotations

import os

from hone.base.errors import MachineError
from hone.serve.spec import EngineSpec


def share_of(spec: EngineSpec, device: str, index: int, count: int) -> tuple[EngineSpec, dict[str, str]]:
    """The engine's spec and environment variables of replica `index` of `count`.

    On GPUs replica i sees the i-th `spec.num_ranks` of those that are visible now. On a CPU all share the memory and the
    threads evenly. Raises MachineError when one GPU is named, or fewer are visible than needed.
    """
    if count == 1:
        return spec, {}
    if device.startswith("cuda"):
        if device not in ("cuda", "cuda:0"):
            raise MachineError(
                f"{count} replicas and one device {device}", fix="use --device=cuda: every replica has its own GPUs"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        first, after = index * spec.num_ranks, (index + 1) * spec.num_ranks
        names = [str(number) for number in range(after)] if visible is None else visible.split(",")
        if after > len(names):
            raise MachineError(
                f"{count} replicas of {spec.num_ranks} GPUs each, {len(names)} GPUs are visible",
                fix="fewer replicas, or more GPUs in CUDA_VISIBLE_DEVICES",
            )
        return spec, {"CUDA_VISIBLE_DEVICES": ",".join(names[first:after])}
    given = spec.gpu_memory_utilization or 0.3
    threads = (
        {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    )
    return spec.model_copy(update={"gpu_memory_utilization": given / count}), threads


def most_replicas(spec: EngineSpec, device: str) -> int:
    """Replicas that have devices of their own: by the GPUs that are visible, or one a core."""
    if not device.startswith("cuda"):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import torch

    return max(1, torch.cuda.device_count() // spec.num_ranks)
