"""Saved tensors of layers in the host's memory: copied out after the forward pass made them, and back before they are read.

On a GPU copies run on a side stream, from and to pinned memory; on a CPU they are ordinary copies by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1024
"""Smaller tensors stay where they are."""


class _HostCopy:
    """One storage's bytes on the host, and on the device while it is needed there."""

    def __init__(self, tensor: Tensor, stream: Any) -> None:
        flat = _bytes(tensor)
        self.device = tensor.device
        self.host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        self.back: Tensor | None = None
        self.ready: Any = None
        if stream is None:
            self.host.copy_(flat)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(flat, non_blocking=True)
        flat.record_stream(stream)

    def fetch(self, stream: Any) -> None:
        """Begins the copy to the device."""
        if self.back is not None:
            return
        if stream is None:
            self.back = self.host.clone()
            return
        with torch.cuda.stream(stream):
            self.back = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            self.back.copy_(self.host, non_blocking=True)
            self.ready = stream.record_event()

    def get(self, stream: Any) -> Tensor:
        """The bytes on the device; the device's work waits for their copy."""
        self.fetch(stream)
        assert self.back is not None, "fetched nothing"
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)
            self.back.record_stream(torch.cuda.current_stream(self.device))
        return self.back


class Copies:
    """The copies of one forward pass, in the order of its layers."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.groups: list[list[_HostCopy]] = []
        self.known: dict[StorageWeakRef, _HostCopy] = {}

    @contextmanager
    def group(self) -> Iterator[None]:
        """What autograd saves inside waits on the host; weights, and what is smaller than a kilobyte, stay."""
        index = len(self.groups)
        self.groups.append([])

        def pack(tensor: Tensor) -> Any:
            whole = tensor._base if tensor._base is not None else tensor
            if isinstance(whole, nn.Parameter) or tensor.untyped_storage().nbytes() < LEAST_BYTES:
                return tensor
            reference = StorageWeakRef(tensor.untyped_storage())
            stored = self.known.get(reference)
            if stored is None:
                stored = self.known[reference] = _HostCopy(tensor, self.stream)
                self.groups[index].append(stored)
            return stored, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            stored, dtype, shape, strides, offset = packed
            found = stored.get(self.stream).view(dtype)
            self._follow(index)
            return found.as_strided(shape, strides, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _follow(self, index: int) -> None:
        """Fetches the layer before; lets go of the layers after, whose backward passes are over."""
        self.known.clear()
        for stored in self.groups[index - 1] if index else ():
            stored.fetch(self.stream)
        for group in self.groups[index + 1 :]:
            for stored in group:
                stored.back = None
            group.clear()


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
