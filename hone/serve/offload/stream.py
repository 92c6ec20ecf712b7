"""Layers whose weights live in host memory: two buffers on the device hold those of a layer for as long as it computes.

While a layer computes, a stream of its own copies the next streamed layer's weights, in one copy, to the other buffer. The
tensors of a layer are views of its buffer, which stay where they are. Rhu et al. 2016, arXiv:1602.08124, move activations so;
Sheng et al. 2023, arXiv:2303.06865, weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hone.cost.serve.offload import NUM_BUFFERS
from hone.serve.offload.pinned import host_memory

_ALIGNED = 256
"""Bytes that each tensor's place in a buffer is a multiple of, as for tensors of their own."""

_RESIDENT = ("kv_rounding",)
"""Modules that the engine reads outside of a layer: scales of a KV cache, few bytes."""


@dataclass(frozen=True)
class _LayerTensor:
    """One parameter or buffer of a layer: where it stands in the module, and in the layer's bytes."""

    module: nn.Module
    name: str
    like: Tensor  # on the meta device: its shape, strides and dtype
    begin: int
    num_bytes: int

    def on(self, memory: Tensor) -> Tensor:
        """The tensor in `memory`, uint8."""
        flat = memory[self.begin : self.begin + self.num_bytes].view(self.like.dtype)
        return flat.as_strided(self.like.shape, self.like.stride())

    def put(self, tensor: Tensor) -> None:
        """Makes `tensor` the module's."""
        if self.name in self.module._parameters:
            self.module._parameters[self.name] = nn.Parameter(tensor, requires_grad=False)
        else:
            self.module._buffers[self.name] = tensor


@dataclass(frozen=True)
class _Streamed:
    layer: nn.Module
    tensors: tuple[_LayerTensor, ...]


class LayerStream:
    """The streamed layers of one model, in the order in which they run. `take` each, then `open`.

    A pass may start at any layer and end early (an error, a pass over part of the layers): a layer whose weights are not in
    its buffer waits for a copy. `device` may be a CPU: copies then end at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._taken: list[_Streamed] = []
        self._hosts: list[Tensor] = []
        """Each layer's bytes. Once opened nothing here refers to the layers, so that all memory is free as soon as the model is gone."""
        self._buffers: list[Tensor] = []
        self._held: list[int | None] = [None] * NUM_BUFFERS
        """The layer (its place among the streamed ones) whose weights each buffer has or receives."""
        self._free = [True] * NUM_BUFFERS
        self._next = 0
        self._arrived = self._events()
        self._left = self._events()
        self.num_copies = 0
        """Copies of a layer's weights since the start."""

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer, which one copy moves."""
        return [len(host) for host in self._hosts]

    def take(self, layer: nn.Module) -> None:
        """Moves the weights of the next layer to host memory; until `open` the layer has none. Raises MachineError as `host_memory`."""
        tensors, end = [], 0
        found = [
            (module, name, tensor)
            for path, module in layer.named_modules()
            if not any(part in _RESIDENT for part in path.split("."))
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        for module, name, tensor in found:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            size = _span(tensor) * tensor.element_size()
            tensors.append(_LayerTensor(module, name, like, end, size))
            end += -(-size // _ALIGNED) * _ALIGNED
        host = host_memory(end, pin=self._side is not None)
        for part, (module, name, tensor) in zip(tensors, found, strict=True):
            flat = tensor.detach().as_strided((_span(tensor),), (1,), tensor.storage_offset())
            host[part.begin : part.begin + part.num_bytes].view(tensor.dtype).copy_(flat)
            part.put(part.like)
            if getattr(module, "raw", None):
                module.raw = []  # what only writing the folder again needs
            assert not any(isinstance(value, Tensor) for value in vars(module).values()), f"{name} is not alone"
        self._taken.append(_Streamed(layer, tuple(tensors)))
        self._hosts.append(host)

    def open(self) -> None:
        """Allocates the buffers, makes the layers' tensors views of them, and starts the first copies."""
        assert len(self._hosts) > NUM_BUFFERS, "as many layers as buffers save no memory"
        size = max(len(host) for host in self._hosts)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)]
        for index, one in enumerate(self._taken):
            for part in one.tensors:
                part.put(part.on(self._buffers[index % NUM_BUFFERS]))
            one.layer.register_forward_pre_hook(partial(self._before, index))
            one.layer.register_forward_hook(partial(self._after, index))
        self._taken.clear()
        self._start(0)

    def _before(self, index: int, *_: Any) -> None:
        """Waits (on the device) until the weights of a layer are in its buffer."""
        slot = index % NUM_BUFFERS
        if self._held[slot] != index:
            self._start(index)
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[slot])

    def _after(self, index: int, *_: Any) -> None:
        """Gives the buffer of a layer that has computed to the next one."""
        slot = index % NUM_BUFFERS
        self._leave(slot)
        self._fill()

    def _start(self, index: int) -> None:
        """Copies from layer `index` on, whatever the buffers hold, when the device is done with it."""
        for slot in range(NUM_BUFFERS):
            self._leave(slot)
            self._held[slot] = None
        self._next = index
        self._fill()

    def _leave(self, slot: int) -> None:
        if self._side is not None:
            self._left[slot].record(torch.cuda.current_stream(self._device))
        self._free[slot] = True

    def _fill(self) -> None:
        """Starts copies in the order of the layers, as far as buffers are free; after the last layer comes the first."""
        while self._free[slot := self._next % NUM_BUFFERS]:
            self._free[slot], self._held[slot] = False, self._next
            host = self._hosts[self._next]
            target = self._buffers[slot][: len(host)]
            if self._side is None:
                target.copy_(host)
            else:
                self._side.wait_event(self._left[slot])
                with torch.cuda.stream(self._side):
                    target.copy_(host, non_blocking=True)
                self._arrived[slot].record(self._side)
            self.num_copies += 1
            self._next = (self._next + 1) % len(self._hosts)

    def _events(self) -> list[Any]:
        return [torch.cuda.Event() for _ in range(NUM_BUFFERS)] if self._side is not None else []


def _span(tensor: Tensor) -> int:
    """Numbers from the first to the last one of a tensor in memory, gaps included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
