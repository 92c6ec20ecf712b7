"""The step on the host: gradients come, state comes, weights go, beside the host's threads that compute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.train.offload.gradients import HostGradients
from hone.train.offload.states import StateFile
from hone.train.optimizers.base import Entry, Parameter, Rule
from hone.train.weights import Weights

CHUNK = 1 << 20
"""Weights that four threads' step updates at a time: their widened gradients stay in the cores' caches. A multiple of 256."""


class HostSteps(Weights):
    """`Weights` whose float32 masters are on the host, in memory or in `files`.

    An update goes bucket by bucket. While the host's threads compute the step of one bucket, the next one's gradients come
    and the last one's weights go, on a stream of their own. Only the buffers of two buckets each way are pinned, so the
    host needs no more memory than masters and state. On a CPU the same code runs without streams.
    """

    device: torch.device
    dtype: torch.dtype
    files: StateFile | None = None
    held: HostGradients | None = None
    """Gradients that are on the host before the update begins; None: they come with it."""

    def _prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Makes what an update needs."""
        self.split = True  # masters are never the parameters
        self.device, self.dtype = device, dtype
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.updates, self.update_s, self._begun = 0, 0.0, 0.0
        """Updates made, their seconds, and when the one under way began; 0: none is."""
        self._moved_bytes = 0
        self._order: list[tuple[str, ...]] = []
        self._at = 0
        self.scales_there = device.type == "cuda"
        """Whether float32 gradients are scaled on the device before they come, which moves less of the host's memory."""
        self._factor = self._left = 1.0
        """Of all gradients, and what of it those of the bucket in turn still want."""
        self._scaled: list[bool] = [False, False]
        self._incoming: list[Tensor | None] = [None, None]
        self._outgoing: list[Tensor | None] = [None, None]
        self._came: list[Any] = [None, None]
        self._went: list[Any] = [None, None]
        self._rounded: dict[str, Tensor] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """As `Weights.notes`: a file that does not pass by the page cache."""
        return (self.files.file.note,) if self.files is not None and self.files.file.note else ()

    def target(self, name: str) -> Tensor | None:
        """Where the rounded weight `name` is wanted; None: `published` brings it there."""
        return self.parameters[name]

    def at_home(self, name: str) -> Tensor | None:
        """The host's memory, flat, into which `name` is rounded where it stays there; None: it goes to `target`."""
        return None

    def start(self, rule: Rule, name: str, parameter: Parameter) -> dict[str, Tensor]:
        """As `Weights.start`: in memory or in the file."""
        if self.files is not None:
            return self.files.start(name, parameter)
        return super().start(rule, name, parameter)

    def begin(self, buckets: Sequence[Sequence[str]], factor: float | Tensor) -> None:
        """Before an update: the buckets in the order of their steps. The first one's gradients and state start to come."""
        assert isinstance(factor, float), "the host's step waits for the norm"
        self._begun, self._factor = time.perf_counter(), factor
        self._order, self._at = [tuple(bucket) for bucket in buckets], 0
        if self.files is not None:
            self.files.begin([name for bucket in self._order for name in bucket])
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._fetch(0)

    def _fetch(self, index: int) -> None:
        """Starts the copy of bucket `index`'s gradients to the host."""
        if index >= len(self._order) or self.held is not None:
            return
        slot, names = index % 2, self._order[index]
        grads = [self.grad(name) for name in names]
        dtype = torch.promote_types(grads[0].dtype, grads[-1].dtype)
        held = self._room(self._incoming, slot, sum(grad.numel() for grad in grads), dtype)
        # Others are widened on the host: scaled in 16 bits they would be rounded twice.
        scaled = self.scales_there and self._factor != 1.0 and all(grad.dtype == torch.float32 for grad in grads)
        self._scaled[slot] = scaled
        with self._copying():
            at = 0
            for grad in grads:
                grad = grad.mul_(self._factor) if scaled else grad
                held[at : at + grad.numel()].view(grad.shape).copy_(grad, non_blocking=True)
                at += grad.numel()
                self._moved_bytes += grad.nbytes
            self._came[slot] = self._mark()

    def take_grads(self, names: Sequence[str], factor: float | Tensor | None) -> list[Tensor]:
        """The gradients of the next bucket as they came, on the host; `step` widens them, and scales those that came unscaled."""
        assert tuple(names) == self._order[self._at], "buckets are updated in the order that was begun"
        assert factor == self._factor, "an update has one factor"
        self._left = self._factor
        if self.held is not None:
            return [self.held.taken(name) for name in names]
        self._fetch(self._at + 1)
        slot = self._at % 2
        self._wait(self._came[slot])
        self._left = 1.0 if self._scaled[slot] else self._factor
        held = self._incoming[slot]
        assert held is not None, "no gradients came"
        found, at = [], 0
        for name in names:
            shape = self.masters[name].shape
            found.append(held[at : at + shape.numel()].view(shape))
            at += shape.numel()
        self._arrived_on_host(names)
        return found

    def _arrived_on_host(self, names: Sequence[str]) -> None:
        """The device's gradients of `names` are not needed any more."""
        self.drop_grads(names)

    def step(self, rule: Rule, entries: Sequence[Entry], names: Sequence[str], **numbers: Any) -> None:
        """The step of `rule` in chunks, each with its gradient widened and scaled before and its weights rounded after."""
        most = chunk_size()
        wide = torch.empty(0)
        for entry, name, out in zip(entries, names, self._outs(names), strict=True):
            mask = self.zeros[name].view(-1) if name in self.zeros else None
            grad = entry.grad.view(-1)
            for start, stop, weight, state in self._parts(rule, entry, name):
                if rule.reads_whole:
                    one = Entry(weight, entry.grad.float() * self._left, dict(state), entry.parameter, entry.part)
                    rule.step([one], **numbers)
                    if mask is not None:
                        weight.view(-1).masked_fill_(mask, 0)
                    out.copy_(weight.view(-1))
                    continue
                wide = wide if len(wide) else torch.empty(most)
                for at in range(start, stop, most):
                    end = min(at + most, stop)
                    scaled = self._wide(grad[at:end], wide[: end - at])
                    values = weight[at - start : end - start]
                    moments = _cut(rule, state, at - start, end - start)
                    rule.step([Entry(values, scaled, moments, entry.parameter)], **numbers)
                    if mask is not None:
                        values.masked_fill_(mask[at:end], 0)
                    out[at:end].copy_(values)
        self._at += 1

    def _wide(self, grad: Tensor, room: Tensor) -> Tensor:
        """A gradient in float32 times what is left of the factor, in `room` unless it is that already."""
        if self._left == 1.0:
            return grad if grad.dtype == torch.float32 else room.copy_(grad)
        if grad.dtype == torch.float32:
            return torch.mul(grad, self._left, out=room)
        return room.copy_(grad).mul_(self._left)

    def _parts(self, rule: Rule, entry: Entry, name: str) -> Iterator[tuple[int, int, Tensor, Mapping[str, Tensor]]]:
        """(start, stop, weight, state) of the parts of a weight that are in memory one after the other."""
        if self.files is not None and name not in self.files.in_memory:
            yield from self.files.windows(name)
        elif rule.reads_whole:
            yield 0, entry.weight.numel(), entry.weight, entry.state
        else:
            flat = {key: tensor.view(-1) for key, tensor in entry.state.items()}
            yield 0, entry.weight.numel(), entry.weight.view(-1), flat

    def _outs(self, names: Sequence[str]) -> list[Tensor]:
        """Host memory for the rounded weights of a bucket, flat; waits until its previous content has gone."""
        slot = self._at % 2
        self._wait(self._went[slot])
        homes = {name: self.at_home(name) for name in names}
        sizes = [self.masters[name].numel() for name in names if homes[name] is None]
        room = iter(
            self._room(self._outgoing, slot, sum(sizes), self.dtype)[: sum(sizes)].split(sizes) if sizes else ()
        )
        self._rounded = {name: next(room) if home is None else home for name, home in homes.items()}
        return [self._rounded[name] for name in names]

    @torch.no_grad()
    def publish(self, names: Sequence[str]) -> None:
        """Starts the copy of the masters of `names`, rounded, to the device, with zeros where weights stay zero."""
        slot = (self._at - 1) % 2
        with self._copying():
            for name in names:
                rounded, home = self._rounded.pop(name, None), self.at_home(name)
                if rounded is None:  # not in an update: masters were written as they lie
                    if name in self.zeros:
                        self.masters[name].masked_fill_(self.zeros[name], 0)
                    if self.files is not None:
                        self.files.changed()
                elif home is not None:
                    continue
                source = self.masters[name] if rounded is None else rounded
                target = self.target(name) if home is None else home
                if target is not None:
                    target.copy_(source.view(target.shape), non_blocking=rounded is not None)
                    self._moved_bytes += target.nbytes if rounded is not None else 0
            self._went[slot] = self._mark()

    def published(self) -> None:
        """After an update: what the device computes next waits for the last copies."""
        if self.files is not None:
            self.files.end()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        super().published()
        if self._begun:
            self.updates, self.update_s = self.updates + 1, self.update_s + time.perf_counter() - self._begun
            self._begun = 0.0

    def moved(self) -> int:
        """Bytes that went to the device and came from it for steps."""
        return self._moved_bytes + (0 if self.held is None else self.held.moved_bytes)

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


def chunk_size() -> int:
    """Weights of a chunk: with more threads more, or starting their work would take as long as the work."""
    return CHUNK * max(1, min(8, torch.get_num_threads() // 4))


def _cut(rule: Rule, state: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """The part of a flat state that belongs to elements `start` to `stop` of its weight."""
    found = {}
    for key, tensor in state.items():
        each = rule.elements_per_entry.get(key, 1)
        found[key] = tensor[start // each : -(-stop // each)]
    return found
