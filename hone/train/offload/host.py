"""The trained weights of one rank with their masters on the host; gradients and layers' weights may be there too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hone.model.decoder import Decoder, parts_of
from hone.train.offload.gradients import HostGradients
from hone.train.offload.layers import LayerFile, LayerStream, StreamedLayer, flat_size
from hone.train.offload.memory import Stage
from hone.train.offload.states import StateFile
from hone.train.offload.steps import HostSteps
from hone.train.offload.techniques import Host
from hone.train.optimizers.base import Parameter, Rule
from hone.train.weights import filled


class HostWeights(HostSteps):
    """`Weights` whose float32 masters are on the host, as `offload` says; parameters in `dtype` are computed with on the device.

    A model on the meta device is made part by part, so that the device never has more of it in float32 than a part.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        *,
        accumulate: bool,
        offload: Host,
        rules: Mapping[str, Rule],
        parameters: Mapping[str, Parameter],
        zeros: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self.offload = offload
        self.pieces, self.masters = {}, {}
        self.sums: dict[str, Tensor] = {}
        """Gradients of several micro-batches, summed in float32 on the device."""
        self.zeros = {name: mask.cpu() for name, mask in (zeros or {}).items()}
        if offload.to_files:
            shapes = {name: tuple(one.shape) for name, one in self.parameters.items()}
            self.files = StateFile(Path(offload.scratch), shapes, rules, parameters, offload.memory_bytes)
            self.masters = self.files.masters
        layers = []
        stage = Stage()
        self._layer_file = None
        if offload.streams_files:
            sizes = [
                dtype.itemsize * flat_size(one for one in layer.parameters() if one.requires_grad)
                for layer in model.layers
            ]
            # Buffers are pinned where the model is made, which it may not be yet.
            self._layer_file = LayerFile(Path(offload.scratch), sizes, pin=torch.cuda.is_available())
        for path in parts_of(model.config):
            made = self._take(model, path, dtype, dict(zeros or {}), stage)
            layers += [] if made is None else [made]
        model.maker = None
        self._prepare(model.embedding.device, dtype)
        if offload.gradients_leave:
            self.held = HostGradients(self.device, wide=accumulate)
        self.layers = LayerStream(list(model.layers), layers, self.device, self._layer_file) if layers else None
        if self.layers is not None:
            self.layers.changed()
        # Weakly: no garbage collector sees a circle of a weight's hook and what holds the weight.
        own = weakref.ref(self)
        for name, parameter in self.parameters.items():
            if self.held is not None or (accumulate and dtype != torch.float32):
                parameter.register_post_accumulate_grad_hook(partial(_arrived, own, name))
        self._fresh: dict[str, Tensor] = {}
        """Rounded weights of the delayed update, in the host's memory, until the device's passes are over."""
        self._pending: Future | None = None
        self._thread = ThreadPoolExecutor(1, "hone-update") if offload.delayed_update else None

    def _take(
        self, model: Decoder, path: str, dtype: torch.dtype, stay: dict[str, Tensor], stage: Stage
    ) -> StreamedLayer | None:
        """Takes the masters of the part of `model` at `path`, with zeros where `stay` says; with streamed parameters a layer's weights."""
        part = model.get_submodule(path)
        if model.maker is not None and any(one.is_meta for one in part.parameters()):
            model.maker.make(part, path)
        taken: dict[str, nn.Parameter] = {}
        for local, parameter in part.named_parameters():
            name = f"{path}.{local}"
            if not parameter.requires_grad:
                continue
            self.parameters[name] = taken[name] = parameter
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: build the model in float32"
            if name in stay:
                parameter.data.masked_fill_(stay[name], 0)
                parameter.register_hook(partial(filled, stay[name]))
            if self.files is None:
                self.masters[name] = stage.copy(torch.empty(parameter.shape), parameter.detach())
            else:
                self.files.put(name, parameter.detach())
        if self.offload.streams and path.startswith("layers.") and taken:
            return StreamedLayer(taken, dtype, next(iter(taken.values())).device, self._layer_file)
        for parameter in taken.values():
            parameter.data = parameter.detach().to(dtype)
        return None

    def moved(self) -> int:
        """As `HostSteps.moved`, with streamed layers and delayed weights."""
        return super().moved() + (0 if self.layers is None else self.layers.moved_bytes)

    @property
    def notes(self) -> tuple[str, ...]:
        """As `HostSteps.notes`, of the layers' file too."""
        own = self._layer_file.file.note if self._layer_file is not None else ""
        return tuple(dict.fromkeys((*super().notes, *([own] if own else ()))))

    # Gradients

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        """Adds a new gradient to the sum of `name`, on the host or in float32 on the device."""
        if parameter.grad is None:  # a pipeline computes it later
            return
        if self.held is not None:
            self.held.add(name, parameter.grad)
        elif name in self.sums:
            self.sums[name].add_(parameter.grad)
        else:
            self.sums[name] = parameter.grad.float()
        parameter.grad = None
        if self.layers is not None:
            self.layers.arrived(name)

    def grad(self, name: str) -> Tensor:
        """The summed gradient of `name`, where it is."""
        if self.held is not None:
            return self.held.sum(name)
        found = self.sums[name] if name in self.sums else self.parameters[name].grad
        assert found is not None, f"{name} got no gradient"
        return found

    def squared_norm(self) -> Tensor:
        """As `Weights.squared_norm`, on the device."""
        if self.held is not None:
            self.held.wait()
        return super().squared_norm().to(self.device)

    def drop_grads(self, names: Sequence[str] | None = None) -> None:
        """Clears the gradients of `names` (None: all)."""
        if self.held is not None:
            self.held.drop(names)
        for name in self.parameters if names is None else names:
            self.parameters[name].grad = None
            self.sums.pop(name, None)
        if names is None:  # the step changes nothing, but what the one before computed is due
            self.finish()

    def before_backward(self, last: bool) -> None:
        """Before a backward pass."""
        if self.layers is not None:
            self.layers.before_backward()

    def after_backward(self) -> None:
        """After a backward pass."""
        if self.layers is not None:
            self.layers.after_backward()

    # Weights

    def published(self) -> None:
        """As `HostSteps.published`; what streams from a file is there."""
        super().published()
        if self.layers is not None and not self.delays:
            self.layers.changed()

    @property
    def delays(self) -> bool:
        """Whether updates go on beside the next step's passes."""
        return self._thread is not None

    def at_home(self, name: str) -> Tensor | None:
        """Of a delayed update all weights, of streamed parameters theirs."""
        if self._thread is not None:
            if name not in self._fresh:
                pinned = self.device.type == "cuda"
                self._fresh[name] = torch.empty(self.masters[name].numel(), dtype=self.dtype, pin_memory=pinned)
            return self._fresh[name]
        home = None if self.layers is None else self.layers.home(name)
        return None if home is None else home.view(-1)

    def run(self, update: Callable[[], None], *, count: int, last: bool) -> None:
        """Runs an update now; or, delayed, beside the next step's passes, after the one before is in the weights."""
        if self._thread is None:
            if self.held is not None:
                self.held.take(apart=False)
            update()
            return
        self.finish()
        assert self.held is not None, "delayed updates have gradients on the host"
        self.held.take(apart=True)
        self._pending = self._thread.submit(update)
        if last or count < self.offload.delayed_update_after:
            self.finish()

    def settle(self) -> None:
        """Waits for a delayed update; the device's weights stay those before it."""
        if self._pending is not None:
            self._pending.result()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for a delayed update and brings its weights to where passes read them."""
        if self._pending is None:
            return
        self.settle()
        self._pending = None
        for name, values in self._fresh.items():
            home = None if self.layers is None else self.layers.home(name)
            target = self.parameters[name] if home is None else home
            target.copy_(values.view(target.shape), non_blocking=True)
            self._moved_bytes += target.nbytes if home is None else 0
        if self.layers is not None:
            self.layers.free()
            self.layers.changed()
        if self.device.type == "cuda":  # the next update writes into the same memory
            torch.cuda.current_stream(self.device).synchronize()

    def delayed(self) -> dict[str, Tensor]:
        """The weights with which the next step computes, where a delayed update made others: what a checkpoint needs too."""
        self.settle()
        if self._pending is None:
            return {}
        found = {}
        for name, parameter in self.parameters.items():
            home = None if self.layers is None else self.layers.home(name)
            found[name] = parameter.detach() if home is None else home
        return found

    @torch.no_grad()
    def delay(self, weights: Mapping[str, Tensor]) -> None:
        """Restores `delayed`, after the masters: the next step computes with `weights`, and the masters are due after it."""
        self._pending = None
        if self._thread is not None:  # masters were rounded into what a delayed update gives
            done: Future = Future()
            done.set_result(None)
            self._pending = done
            self.finish()
            self._pending = done if weights else None
        for name, values in weights.items():
            home = None if self.layers is None else self.layers.home(name)
            (self.parameters[name] if home is None else home).copy_(values)
        if self.layers is not None:
            self.layers.changed()

    @contextmanager
    def whole(self, path: str, *, wide: bool) -> Iterator[None]:
        """As `Weights.whole`; of a delayed update the masters, which are what the training has made so far."""
        self.settle()
        chosen = [name for name in self.parameters if name.startswith(f"{path}.")]
        before = {name: self.parameters[name].data for name in chosen}
        for name in chosen:
            home = None if self.layers is None else self.layers.home(name)
            if wide:
                self.parameters[name].data = self.masters[name].detach()
            elif self._pending is not None:
                self.parameters[name].data = self._fresh[name].view(self.masters[name].shape)
            elif home is not None:
                self.parameters[name].data = home
        try:
            yield
        finally:
            for name, values in before.items():
                self.parameters[name].data = values


def _arrived(own: weakref.ref[HostWeights], name: str, parameter: nn.Parameter) -> None:
    """The hook of weight `name`."""
    weights = own()
    if weights is not None:
        weights._add(name, parameter)
