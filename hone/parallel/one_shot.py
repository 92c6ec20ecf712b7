"""An all-reduce of small messages in one kernel: every rank writes into its own buffer and reads those of all others.

NCCL's ring takes 2 (n - 1) transfers one after another, which for the few kilobytes of a decode step is all latency.
Here each of n GPUs of one host reads n - 1 buffers over NVLink at once. Multicast is not used.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 512 << 10
"""Largest message by default: beyond, each rank reading every other one's whole message costs more than a ring."""

NUM_BLOCKS = 16
"""Blocks of every launch: all count their calls alike, so that the count may select a half of the buffer."""

PATIENCE_S = 300
"""Seconds that a rank waits for the others in the kernel, then it stops its GPU's work with an error."""


class OneShot:
    """The buffers of the ranks of one process group, each on its own GPU of one host; at most 8 ranks, a power of 2.

    A buffer has two halves, used in turn: a rank may write the half of call k again in call k + 2, because it has seen in
    call k + 1 that all others have ended call k. Calls are counted on the device, so that a CUDA graph may replay them.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        self.rank, self.size, self.max_bytes = rank, size, max_bytes
        self._buffer, buffers = _shared(group, 2 * max_bytes, device)
        self._flags, flags = _shared(group, 4 * size * NUM_BLOCKS, device)
        self._flags.zero_()
        self._addresses = torch.tensor([buffers, flags], dtype=torch.int64, device=device)
        self._calls = torch.zeros(NUM_BLOCKS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group)  # no rank signals before all flags are zero

    @staticmethod
    def possible(size: int, devices: list[int]) -> bool:
        """Whether the GPUs `devices` of this host can read each other's memory, and are as many as the kernel is made for.

        False where the environment has HONE_ONE_SHOT=0: NCCL then sums all messages.
        """
        if os.environ.get("HONE_ONE_SHOT") == "0":
            return False
        pairs = [(one, other) for one in devices for other in devices if one != other]
        return size in (2, 4, 8) and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)

    def takes(self, x: Tensor) -> bool:
        """Whether `all_reduce` sums such a tensor."""
        fits = 0 < x.numel() * x.element_size() <= self.max_bytes and x.numel() % 16 == 0
        return fits and x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float16, torch.float32)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, a new tensor; added in the order of the ranks in float32, so all get the same bits."""
        from hone.parallel.one_shot_triton import all_reduce

        return all_reduce(x, self._addresses, self._calls, self.rank, self.max_bytes, PATIENCE_S)


def _shared(group: Any, num_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Memory on this rank's GPU that all ranks can reach, and the address of every rank's."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group=group)
    return memory, list(handle.buffer_ptrs)
