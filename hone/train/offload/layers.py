"""Layers whose weights wait in the host's memory: each comes to the device before its passes and leaves after them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hone.train.offload.files import PAGE, ScratchFile, Span, pinned

ALIGN = 64
"""Weights begin at multiples of so many elements, as kernels like them."""


class LayerFile:
    """Layers' weights in a scratch file of `sizes` (bytes), and buffers in which those come that are about to be read."""

    def __init__(self, folder: Path, sizes: Sequence[int], *, pin: bool) -> None:
        pages = [-(-size // PAGE) * PAGE for size in sizes]
        self._offsets = [sum(pages[:index]) for index in range(len(pages))]
        self.file = ScratchFile(folder, sum(pages))
        self._made = 0
        self._free: list[tuple[Tensor, Tensor]] = [pinned(max(pages), torch.uint8, pin=pin) for _ in range(3)]

    def home(self, numbers: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """The mapped memory of the next layer, and its offset."""
        offset, self._made = self._offsets[self._made], self._made + 1
        return self.file.tensor(Span(offset, (numbers,), dtype)), offset

    def start(self, offset: int, num_bytes: int) -> tuple[list[Future], tuple[Tensor, Tensor]]:
        """Starts to read a layer into a buffer, which `done` gives back."""
        room = self._free.pop() if self._free else pinned(-(-num_bytes // PAGE) * PAGE, torch.uint8, pin=False)
        return self.file.read(room[0][: -(-num_bytes // PAGE) * PAGE], offset), room

    def done(self, room: tuple[Tensor, Tensor]) -> None:
        """The buffer may be filled again."""
        self._free.append(room)


class StreamedLayer:
    """One layer: `home` is its weights in the host's memory or in `file`, flat, in the order and places of `flat` on the device."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        file: LayerFile | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self._places: dict[str, tuple[int, torch.Size]] = {}
        size = flat_size(parameters.values())
        at = 0
        for name, parameter in parameters.items():
            self._places[name] = at, parameter.shape
            at += flat_size([parameter])
        self._file, self._offset = file, 0
        self._reading: tuple[list[Future], tuple[Tensor, Tensor]] | None = None
        if file is None:
            self.home, self._owner = pinned(size, dtype, pin=device.type == "cuda")
        else:
            self.home, self._offset = file.home(size, dtype)
        self.flat = torch.empty(size, dtype=dtype, device=device)
        self.missing: set[str] = set()
        """Weights whose gradient the backward pass under way has not made yet."""
        for name, parameter in parameters.items():
            self.view(self.home, name).copy_(parameter.detach())
            parameter.data = self.view(self.flat, name)
        self.there = True
        self.came: Any = None
        self.free()

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The weight `name` in `flat`, in its shape."""
        at, shape = self._places[name]
        return flat[at : at + shape.numel()].view(shape)

    @torch.no_grad()
    def bring(self, stream: Any) -> int:
        """Starts the copy to the device, on `stream` where there is one. The bytes that it moves."""
        if self.there:
            return 0
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.there = True
        if self._file is not None:  # `ready` waits for it
            self._reading = self._file.start(self._offset, self.home.nbytes)
            return self.home.nbytes
        if stream is None:
            self.flat.copy_(self.home)
            return self.home.nbytes
        # The device's memory may have been another layer's, which what runs now still reads.
        stream.wait_stream(torch.cuda.current_stream(self.flat.device))
        with torch.cuda.stream(stream):
            self.flat.copy_(self.home, non_blocking=True)
            self.came = stream.record_event()
        return self.home.nbytes

    def ready(self) -> None:
        """What the device computes next waits for the copy."""
        if self._reading is not None and self._file is not None:
            (moving, room), self._reading = self._reading, None
            self._file.file.wait(moving)
            with torch.no_grad():
                self.flat.copy_(room[0][: self.home.nbytes].view(self.home.dtype))
            self._file.done(room)
        if self.came is not None:
            torch.cuda.current_stream(self.flat.device).wait_event(self.came)
            self.came = None

    def free(self) -> None:
        """The device's memory is given back."""
        if self.there:
            self.ready()
            self.flat.untyped_storage().resize_(0)
            self.there = False


def flat_size(parameters: Iterable[Tensor]) -> int:
    """Elements that weights take one after the other."""
    return sum(-(-one.numel() // ALIGN) * ALIGN for one in parameters)


class LayerStream:
    """The streamed layers of a model, and the hooks that bring and free them: two are on the device at a time."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layers: Sequence[StreamedLayer],
        device: torch.device,
        file: LayerFile | None = None,
    ) -> None:
        self.layers, self.file = list(layers), file
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._home = {name: layer for layer in layers for name in layer.parameters}
        self.backward = False
        self.moved_bytes = 0
        # Weakly: no garbage collector sees a circle of a weight's hook and what holds the weight.
        own = weakref.ref(self)
        for index, module in enumerate(modules):
            module.register_forward_pre_hook(partial(_before, own, index))
            module.register_forward_hook(partial(_after, own, index))

    def home(self, name: str) -> Tensor | None:
        """The host's memory of a streamed weight, in its shape; None: it is none."""
        layer = self._home.get(name)
        return None if layer is None else layer.view(layer.home, name)

    def before_backward(self) -> None:
        """Before a backward pass."""
        self.backward = True
        for layer in self.layers:
            layer.missing = set(layer.parameters)

    def after_backward(self) -> None:
        """After it: no layer is on the device, so that the next passes bring the weights of the step that follows."""
        self.backward = False
        self.free()

    def changed(self) -> None:
        """After `home`s were written: a file has it before it is read."""
        if self.file is not None:
            self.file.file.flush()

    def free(self) -> None:
        """Frees all layers."""
        for layer in self.layers:
            layer.free()

    def arrived(self, name: str) -> None:
        """The gradient of `name` is there: with the last one of its layer the layer leaves."""
        layer = self._home.get(name)
        if layer is not None:
            layer.missing.discard(name)
            if self.backward and not layer.missing:
                layer.free()

    def bring(self, index: int, following: int) -> None:
        """Layer `index` is about to compute, then `following`, if there is one."""
        moved = self.layers[index].bring(self._stream)
        self.layers[index].ready()
        if 0 <= following < len(self.layers):
            moved += self.layers[following].bring(self._stream)
        self.moved_bytes += moved if self.backward or torch.is_grad_enabled() else 0  # evaluations are no steps


@torch.compiler.disable  # it would be compiled for every layer's number
def _before(own: weakref.ref[LayerStream], index: int, *_: Any) -> None:
    stream = own()
    assert stream is not None, "the weights of a model are gone"
    stream.bring(index, index - 1 if stream.backward else index + 1)


@torch.compiler.disable
def _after(own: weakref.ref[LayerStream], index: int, _: nn.Module, __: Any, output: Tensor) -> None:
    stream = own()
    assert stream is not None, "the weights of a model are gone"
    grad = torch.is_grad_enabled() and output.requires_grad
    if grad:
        output.register_hook(partial(_back, own, index))
    # A layer that is recomputed needs them again at once, and the last one when the backward pass begins.
    if not stream.backward and not (grad and index == len(stream.layers) - 1):
        stream.layers[index].free()


def _back(own: weakref.ref[LayerStream], index: int, _: Tensor) -> None:
    stream = own()
    assert stream is not None, "the weights of a model are gone"
    stream.bring(index, index - 1)
