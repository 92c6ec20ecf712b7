"""The trained weights with their masters in the host's memory: gradients come and weights go through pinned buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hone.model.decoder import Decoder
from hone.train.optimizers.base import Entry, Rule
from hone.train.weights import Weights, filled

CHUNK = 1 << 20
"""Weights that a host's step updates at a time: their widened gradients stay in the cores' caches. A multiple of 256."""


class HostWeights(Weights):
    """`Weights` whose float32 masters are on the host; parameters and gradients, in `dtype`, are on the model's device.

    An update goes bucket by bucket. While the host's threads compute the step of one bucket, the next one's gradients come
    and the last one's weights go, on a stream of their own. Only the buffers of two buckets each way are pinned, so the
    host needs no more memory than masters and state. On a CPU the same code runs without streams.
    """

    def __init__(
        self, model: Decoder, dtype: torch.dtype, *, accumulate: bool, zeros: Mapping[str, Tensor] | None = None
    ) -> None:
        self.parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self.split = True
        self.dtype = dtype
        self.pieces, self.masters = {}, {}
        self.sums: dict[str, Tensor] = {}
        """Gradients of several micro-batches, summed in float32 on the device."""
        self.zeros = {name: mask.cpu() for name, mask in (zeros or {}).items()}
        for name, mask in (zeros or {}).items():
            self.parameters[name].data.masked_fill_(mask, 0)
            self.parameters[name].register_hook(partial(filled, mask))
        for name, parameter in self.parameters.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}: build the model in float32"
            self.masters[name] = torch.empty(parameter.shape).copy_(parameter.detach())
            parameter.data = parameter.detach().to(dtype)
            if accumulate and dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(partial(self._add, name))
        self.device = model.embedding.device
        self._stream: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._buckets: list[tuple[str, ...]] = []
        self._at = 0
        self._factor = 1.0
        self._incoming: list[Tensor | None] = [None, None]
        self._outgoing: list[Tensor | None] = [None, None]
        self._came: list[Any] = [None, None]
        self._went: list[Any] = [None, None]
        self._rounded: dict[str, Tensor] = {}

    def _add(self, name: str, parameter: Tensor) -> None:
        """Adds a new gradient to the float32 sum of `name`."""
        assert parameter.grad is not None, "a gradient's hook without a gradient"
        if name in self.sums:
            self.sums[name].add_(parameter.grad)
        else:
            self.sums[name] = parameter.grad.float()
        parameter.grad = None

    def grad(self, name: str) -> Tensor:
        """The summed gradient of `name`, on the device."""
        found = self.sums[name] if name in self.sums else self.parameters[name].grad
        assert found is not None, f"{name} got no gradient"
        return found

    def drop_grads(self, names: Sequence[str] | None = None) -> None:
        """Clears the gradients of `names` (None: all)."""
        for name in self.parameters if names is None else names:
            self.parameters[name].grad = None
            self.sums.pop(name, None)

    # An update

    def begin(self, buckets: Sequence[Sequence[str]]) -> None:
        """Before an update: the buckets in the order of their steps. The first one's gradients start to come."""
        self._buckets, self._at = [tuple(bucket) for bucket in buckets], 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._fetch(0)

    def _fetch(self, index: int) -> None:
        """Starts the copy of bucket `index`'s gradients to the host."""
        if index >= len(self._buckets):
            return
        slot, names = index % 2, self._buckets[index]
        grads = [self.grad(name) for name in names]
        dtype = torch.promote_types(grads[0].dtype, grads[-1].dtype)
        held = self._room(self._incoming, slot, sum(grad.numel() for grad in grads), dtype)
        with self._copying():
            at = 0
            for grad in grads:
                held[at : at + grad.numel()].view(grad.shape).copy_(grad, non_blocking=True)
                at += grad.numel()
            self._came[slot] = self._mark()

    def take_grads(self, names: Sequence[str], factor: float) -> list[Tensor]:
        """The gradients of the next bucket as they came, on the host; `step` widens and scales them by `factor`."""
        assert tuple(names) == self._buckets[self._at], "buckets are updated in the order that was begun"
        self._fetch(self._at + 1)
        slot, self._factor = self._at % 2, factor
        self._wait(self._came[slot])
        held = self._incoming[slot]
        assert held is not None, "no gradients came"
        found, at = [], 0
        for name in names:
            shape = self.masters[name].shape
            found.append(held[at : at + shape.numel()].view(shape))
            at += shape.numel()
        self.drop_grads(names)
        return found

    def step(self, rule: Rule, entries: Sequence[Entry], names: Sequence[str], **numbers: Any) -> None:
        """The step of `rule` in chunks, each with its gradient widened and scaled before and its weights rounded after."""
        for entry, out in zip(entries, self._outs(names), strict=True):
            if rule.reads_whole:
                entry.grad = entry.grad.float() * self._factor
                rule.step([entry], **numbers)
                out.copy_(entry.weight.view(-1))
                continue
            weight, grad = entry.weight.view(-1), entry.grad.view(-1)
            wide = torch.empty(min(CHUNK, len(weight)))
            for start in range(0, len(weight), CHUNK):
                stop = min(start + CHUNK, len(weight))
                scaled = wide[: stop - start].copy_(grad[start:stop])
                if self._factor != 1.0:
                    scaled.mul_(self._factor)
                state = {}
                for key, tensor in entry.state.items():
                    each = rule.elements_per_entry.get(key, 1)
                    state[key] = tensor.view(-1)[start // each : -(-stop // each)]
                rule.step([Entry(weight[start:stop], scaled, state, entry.parameter)], **numbers)
                out[start:stop].copy_(weight[start:stop])
        self._at += 1

    def _outs(self, names: Sequence[str]) -> list[Tensor]:
        """Host memory for the rounded weights of a bucket, flat; waits until its previous content has gone."""
        slot = self._at % 2
        self._wait(self._went[slot])
        sizes = [self.masters[name].numel() for name in names]
        outs = list(self._room(self._outgoing, slot, sum(sizes), self.dtype)[: sum(sizes)].split(sizes))
        self._rounded = dict(zip(names, outs, strict=True))
        return outs

    @torch.no_grad()
    def publish(self, names: Sequence[str]) -> None:
        """Starts the copy of the masters of `names`, rounded, to the device, with zeros where weights stay zero."""
        slot = (self._at - 1) % 2
        with self._copying():
            for name in names:
                rounded = self._rounded.pop(name, None)
                if name in self.zeros:
                    self.masters[name].masked_fill_(self.zeros[name], 0)
                    rounded = None
                source = self.masters[name] if rounded is None else rounded.view(self.masters[name].shape)
                self.parameters[name].copy_(source, non_blocking=rounded is not None)
            self._went[slot] = self._mark()

    def published(self) -> None:
        """After an update: what the device computes next waits for the last copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    # Buffers and the stream

    def _room(self, slots: list[Tensor | None], slot: int, numbers: int, dtype: torch.dtype) -> Tensor:
        held = slots[slot]
        if held is None or held.numel() < numbers or held.dtype != dtype:
            slots[slot] = held = torch.empty(numbers, dtype=dtype, pin_memory=self._stream is not None)
        return held

    def _copying(self) -> Any:
        return torch.cuda.stream(self._stream)  # with None: nothing

    def _mark(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def _wait(event: Any) -> None:
        if event is not None:
            event.synchronize()
