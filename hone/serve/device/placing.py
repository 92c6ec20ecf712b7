"""Brings a step's arrays to the device: on a GPU in one copy from pinned memory, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64
_RING = 4
"""Pinned buffers in turn: more than there are steps on their way."""


class Placer:
    """Places arrays on one device. Tensors on a CPU share the arrays' memory."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def place(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Tensors of the arrays' names, shapes and dtypes."""
        if self._device.type != "cuda":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        starts, total = {}, 0
        for name, array in arrays.items():
            starts[name] = total
            total += -(-array.nbytes // _ALIGNED) * _ALIGNED
        host, copied = self._buffer(max(total, 1))
        memory = host.numpy()
        for name, array in arrays.items():
            begin = starts[name]
            memory[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on = host[:total].to(self._device, non_blocking=True)
        copied.record()
        return {
            name: on[starts[name] : starts[name] + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for name, array in arrays.items()
        }

    def _buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """A pinned buffer of at least `size` bytes whose last copy has ended, and the event of its next one."""
        self._turn = (self._turn + 1) % _RING
        while len(self._ring) < _RING:
            self._ring.append((torch.empty(1 << 16, dtype=torch.uint8).pin_memory(), torch.cuda.Event()))
        host, copied = self._ring[self._turn]
        copied.synchronize()
        if len(host) < size:
            host = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8).pin_memory()
            self._ring[self._turn] = host, copied
        return host, copied


class FixedInputs:
    """Arrays of fixed shapes that a captured pass reads: written on the host, brought to the same place by one copy."""

    def __init__(self, sizes: Mapping[str, tuple[tuple[int, ...], type]], device: torch.device | str) -> None:
        starts, total = {}, 0
        for name, (shape, dtype) in sizes.items():
            starts[name] = total
            total += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        self._buffer = torch.zeros(total, dtype=torch.uint8, device=device)
        self.on = {
            name: self._buffer[starts[name] :][: int(np.prod(shape)) * np.dtype(dtype).itemsize]
            .view(_TORCH[np.dtype(dtype)])
            .view(shape)
            for name, (shape, dtype) in sizes.items()
        }
        """The tensors on the device, by name."""
        self._ring: list[tuple[Tensor, torch.cuda.Event | None, dict[str, np.ndarray]]] = []
        on_gpu = self._buffer.is_cuda
        for _ in range(_RING):
            host = torch.zeros(total, dtype=torch.uint8, pin_memory=on_gpu)
            memory = host.numpy()
            arrays = {
                name: memory[starts[name] :][: int(np.prod(shape)) * np.dtype(dtype).itemsize]
                .view(dtype)
                .reshape(shape)
                for name, (shape, dtype) in sizes.items()
            }
            self._ring.append((host, torch.cuda.Event() if on_gpu else None, arrays))
        self._turn = 0

    def next(self) -> dict[str, np.ndarray]:
        """The arrays to write for the next step; they hold what an earlier step left."""
        self._turn = (self._turn + 1) % _RING
        _, copied, arrays = self._ring[self._turn]
        if copied is not None:
            copied.synchronize()
        return arrays

    def send(self) -> None:
        """Starts the copy of the arrays that `next` gave."""
        host, copied, _ = self._ring[self._turn]
        self._buffer.copy_(host, non_blocking=True)
        if copied is not None:
            copied.record()


_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
