"""Gradients that leave the device as the backward pass makes them, and are summed in the host's memory."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hone.train.offload.files import pinned

SLOTS = 4
"""Pinned buffers in which gradients wait for the thread that adds them."""


class HostGradients:
    """Sums of gradients on the host, of several micro-batches in float32 (`wide`), else as the one backward pass gives them.

    On a GPU copies go on a side stream into pinned memory beside the backward pass, and a thread adds them; on a CPU it is
    done at once. The memory of the sums stays for the next step.
    """

    def __init__(self, device: torch.device, *, wide: bool) -> None:
        self._device, self._wide = device, wide
        self._sums: dict[str, Tensor] = {}
        self._others: dict[str, Tensor] = {}
        """The memory of a second set, for the step that is computed while the next gradients come."""
        self._owners: list[Tensor] = []
        self._filled: set[str] = set()
        self._given: dict[str, Tensor] = {}
        on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None
        self._thread = ThreadPoolExecutor(1, "hone-gradients") if on_gpu else None
        self._slots: list[Tensor | None] = [None] * SLOTS
        self._adding: list[Future | None] = [None] * SLOTS
        self._turn = 0
        self.moved_bytes = 0

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a new gradient of `name`, whose memory may be used again on the device's stream."""
        first, gradient = name not in self._filled, gradient.contiguous()
        self._filled.add(name)
        self.moved_bytes += gradient.nbytes
        if name not in self._sums:
            dtype = torch.float32 if self._wide else gradient.dtype
            pin = self._stream is not None and not self._wide
            memory, owner = pinned(gradient.numel(), dtype, pin=pin)
            self._owners.append(owner)
            self._sums[name] = memory.view(gradient.shape)
        held = self._sums[name]
        if self._stream is None:
            held.copy_(gradient) if first else held.add_(gradient)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        gradient.record_stream(self._stream)
        if not self._wide:
            assert first, "one micro-batch gives one gradient"
            with torch.cuda.stream(self._stream):
                held.copy_(gradient, non_blocking=True)
            return
        slot, self._turn = self._turn % SLOTS, self._turn + 1
        waiting = self._adding[slot]
        if waiting is not None:
            waiting.result()
        room = self._slots[slot]
        if room is None or room.numel() < gradient.numel():
            self._slots[slot] = room = torch.empty(gradient.numel(), dtype=gradient.dtype, pin_memory=True)
        room = room[: gradient.numel()].view(gradient.shape)
        with torch.cuda.stream(self._stream):
            room.copy_(gradient, non_blocking=True)
            came = self._stream.record_event()
        assert self._thread is not None, "a GPU's gradients are added by a thread"
        self._adding[slot] = self._thread.submit(_add, held, room, came, first)

    def wait(self) -> None:
        """Waits until all gradients are there."""
        for waiting in self._adding:
            if waiting is not None:
                waiting.result()
        if self._stream is not None:
            self._stream.synchronize()

    def sum(self, name: str) -> Tensor:
        """The sum of `name`; `wait` comes before."""
        assert name in self._filled, f"{name} got no gradient"
        return self._sums[name]

    def take(self, *, apart: bool) -> None:
        """Gives all sums to the update that begins. `apart`: it goes on while the next gradients come."""
        self.wait()
        self._given = {name: self._sums[name] for name in self._filled}
        self._filled.clear()
        if apart:
            self._sums, self._others = self._others, self._sums

    def taken(self, name: str) -> Tensor:
        """The sum of `name` that was given."""
        assert name in self._given, f"{name} got no gradient"
        return self._given[name]

    def drop(self, names: Collection[str] | None = None) -> None:
        """Forgets the sums of `names` (None: all)."""
        self.wait()
        self._filled.difference_update(list(self._filled) if names is None else names)


def _add(held: Tensor, room: Tensor, came: Any, first: bool) -> None:
    came.synchronize()
    held.copy_(room) if first else held.add_(room)
