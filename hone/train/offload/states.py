"""Masters and optimizer state in a scratch file: an update reads, computes and writes windows of them at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from hone.cost.train.rates import BUFFERS, WINDOW
from hone.train.offload.files import PAGE, ScratchFile, aligned, layout
from hone.train.offload.memory import Stage
from hone.train.optimizers.base import Parameter, Rule

MOST_AT_ONCE = 1 / 4
"""Of the bytes in a file those of one weight."""


class StateFile:
    """The float32 masters of `shapes` and the state of their rule, in a file in `folder`, but for `memory_bytes` of them.

    Weights that stay in memory are spread among the others, so that the disk is busy throughout an update. `masters` and what `start` returns are the tensors of the file, mapped: whatever is not an update uses them like others.
    An update goes through `begin` and `windows`, past the page cache.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        rules: Mapping[str, Rule],
        parameters: Mapping[str, Parameter],
        memory_bytes: float = 0,
    ) -> None:
        tensors: dict[tuple[str, str], Tensor] = {}
        for name, shape in shapes.items():
            master = torch.empty(shape)
            tensors[name, "weight"] = master.to("meta")
            for key, state in rules[name].start(master, parameters[name]).items():
                tensors[name, key] = state.to("meta")
        self.in_memory = _spread(tensors, memory_bytes)
        tensors = {key: tensor for key, tensor in tensors.items() if key[0] not in self.in_memory}
        self._rules = rules
        self._spans, num_bytes = layout(tensors)
        self.file = ScratchFile(folder, num_bytes)
        self._keys: dict[str, list[str]] = {}
        for name, key in self._spans:
            self._keys.setdefault(name, []).append(key)
        self.masters = {
            name: torch.empty(shape) if name in self.in_memory else self.file.tensor(self._spans[name, "weight"])
            for name, shape in shapes.items()
        }
        self._stage = Stage()
        self._used: set[str] = set()
        """Weights whose state is not the file's zeros any more."""
        self._mapped_written = False
        """Whether mapped tensors were written since the file was last read past them."""
        self._buffers: list[Tensor] = []
        self._writing: dict[int, list[Future]] = {}
        self._queue: deque[tuple[str, int, int]] = deque()
        self._reading: deque[tuple[int, list[Future], dict[str, Tensor]]] = deque()
        self._turn = 0

    def start(self, name: str, parameter: Parameter) -> dict[str, Tensor]:
        """As `Rule.start`, in the file or in memory."""
        if name in self.in_memory:
            return self._rules[name].start(self.masters[name], parameter)
        found = {key: self.file.tensor(self._spans[name, key]) for key in self._keys[name] if key != "weight"}
        for key, values in self._rules[name].start(torch.empty(self.masters[name].shape), parameter).items():
            if name in self._used or values.any():
                found[key].copy_(values)
                self._mapped_written = True
        self._used.add(name)
        return found

    def put(self, name: str, values: Tensor) -> None:
        """Writes the master of `name`, past the page cache, which would take memory for a while."""
        if name in self.in_memory:
            self._stage.copy(self.masters[name], values)
            return
        span, flat = self._spans[name, "weight"], values.reshape(-1)
        room = aligned(4 * min(len(flat), WINDOW))
        for start in range(0, len(flat), WINDOW):
            count = min(WINDOW, len(flat) - start)
            self._stage.copy(room[: 4 * count].view(torch.float32), flat[start : start + count])
            self.file.wait(self.file.write(room[: -(-4 * count // PAGE) * PAGE], span.offset + 4 * start))
        self.file.written_bytes = 0  # of updates alone

    def changed(self) -> None:
        """To be called when mapped tensors were written."""
        self._mapped_written = True

    # An update

    def begin(self, names: Sequence[str]) -> None:
        """Before an update of `names`, in this order: the first windows start to come."""
        if self._mapped_written:
            self.file.flush()
            self._mapped_written = False
        assert not self._queue and not self._reading, "an update was not ended"
        for name in (one for one in names if one not in self.in_memory):
            numel, whole = self.masters[name].numel(), self._rules[name].reads_whole
            step = max(numel, 1) if whole else WINDOW
            self._queue.extend((name, start, min(start + step, numel)) for start in range(0, numel, step))
        for _ in range(BUFFERS - 1):
            self._fetch()

    def windows(self, name: str) -> Iterator[tuple[int, int, Tensor, dict[str, Tensor]]]:
        """(start, stop, master, state) of every window of `name`, flat, or of a rule that reads whole weights in their shapes.

        What is changed in them until the next one is asked for is written to the file.
        """
        numel, done = self.masters[name].numel(), 0
        while done < numel:
            index, moving, held = self._reading.popleft()
            self.file.wait(moving)
            start = done
            found = {key: self._view(name, key, start, numel, memory) for key, memory in held.items()}
            done = start + found["weight"].numel()
            weight = found.pop("weight")
            yield start, done, weight, found
            self._writing[index] = []
            for key, memory in held.items():
                offset, _ = self._place(name, key, start, done)
                self._writing[index] += self.file.write(memory, offset)
            self._fetch()

    def end(self) -> None:
        """After an update: waits for what is being written."""
        for moving in self._writing.values():
            self.file.wait(moving)
        self._writing.clear()

    def _fetch(self) -> None:
        """Starts to read the next window, into the buffer whose content has been written for the longest."""
        if not self._queue:
            return
        name, start, stop = self._queue.popleft()
        index, self._turn = self._turn % BUFFERS, self._turn + 1
        self.file.wait(self._writing.pop(index, ()))
        places = {key: self._place(name, key, start, stop) for key in self._keys[name]}
        needed = sum(size for _, size in places.values())
        while len(self._buffers) <= index:
            self._buffers.append(aligned(0))
        if len(self._buffers[index]) < needed:
            self._buffers[index] = aligned(needed)
        at, moving, held = 0, [], {}
        for key, (offset, size) in places.items():
            held[key] = self._buffers[index][at : at + size]
            moving += self.file.read(held[key], offset)
            at += size
        self._reading.append((index, moving, held))

    def _each(self, name: str, key: str) -> int:
        return 1 if key == "weight" else self._rules[name].elements_per_entry.get(key, 1)

    def _place(self, name: str, key: str, start: int, stop: int) -> tuple[int, int]:
        """(offset, bytes) in the file, in whole pages, of what belongs to the elements `start` to `stop` of a weight."""
        span, each = self._spans[name, key], self._each(name, key)
        if self._rules[name].reads_whole:
            return span.offset, -(-span.num_bytes // PAGE) * PAGE
        size = span.dtype.itemsize
        first, last = start // each * size, -(-stop // each) * size
        assert first % PAGE == 0, "a window begins within a page"
        return span.offset + first, -(-(last - first) // PAGE) * PAGE

    def _view(self, name: str, key: str, start: int, numel: int, memory: Tensor) -> Tensor:
        """The tensor in a window's memory."""
        span, each = self._spans[name, key], self._each(name, key)
        if self._rules[name].reads_whole:
            return memory[: span.num_bytes].view(span.dtype).view(span.shape)
        stop = min(start + WINDOW, numel)
        return memory[: (-(-stop // each) - start // each) * span.dtype.itemsize].view(span.dtype)


def _spread(tensors: Mapping[tuple[str, str], Tensor], memory_bytes: float) -> set[str]:
    """Names of those in memory, of `memory_bytes` at most: the others are as evenly among them as their sizes allow.

    A weight that would be more than `MOST_AT_ONCE` of what is in the file stays in memory if the others are enough: while the steps of
    many weights in memory follow each other the disk has only the next windows to read, and then waits.
    """
    sizes: dict[str, int] = {}
    for (name, _), tensor in tensors.items():
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    least = max(sum(sizes.values()) - memory_bytes, 0)
    some = {name: size for name, size in sizes.items() if size <= MOST_AT_ONCE * least}
    if sum(some.values()) < least:
        some = sizes
    share, due, filed = least / max(sum(some.values()), 1), 0.0, set()
    for name, size in some.items():
        due += share * size
        if due >= size / 2 and share:
            filed.add(name)
            due -= size
    there = sum(some[name] for name in filed)
    for name in sorted(some.keys() - filed, key=lambda one: (some[one], one)):
        if there >= least:
            break
        filed.add(name)
        there += some[name]
    for name in sorted(filed, key=lambda one: (-some[one], one)):
        if there - some[name] >= least:
            filed.remove(name)
            there -= some[name]
    return sizes.keys() - filed
