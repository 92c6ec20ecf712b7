"""Which layers each pipeline stage has: those with which the simulated step of the schedule is the shortest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hone.base.figure import Estimate
from hone.cost.pipeline.simulate import seconds_of_many
from hone.cost.train.figures import bytes_by_rank, play_options, updated, with_more
from hone.cost.train.pipeline import Pipelined, dims_of_layers
from hone.cost.train.search import Cuts, search
from hone.cost.train.training import Training
from hone.cost.train.update import UpdateCost, masked, update_seconds
from hone.measure.machine import Machine

MOST_PASSES = 800_000
"""Passes of all cuts that are simulated for a plan: about .2 s of a CPU."""
MOST_CHECKED = 8
"""The best cuts, whose transfers between data-parallel ranks and whose memory are computed."""


def cut(work: Training, machine: Machine, *, zeros: bool = False) -> Training:
    """`work` with its layers cut into stages such that a step is as short as it can be found; `zeros`: it has a mask.

    It begins at the cut that `work` has, is never slower, and needs no more memory than that one where it needs more than there is.
    Without pipeline stages, or where the cut changes the result (asynchronous schedules), `work` as it is.
    """
    pipeline = work.pipeline
    if pipeline is None or not pipeline.begins:
        return work
    first = [*(layers.start for layers in pipeline.layers), work.model.num_layers]
    asked = _Simulated(work, pipeline, machine)
    cuts, took = search(first, pipeline.begins, asked, max(MOST_PASSES // len(pipeline.table.turns), 1))
    own = int((cuts == np.array(first)).all(axis=1).argmax())
    best = [*range(min(MOST_CHECKED, own)), own]
    if own == 0:
        return work
    found = {number: work if number == own else _with(work, _ranges(cuts[number]), zeros) for number in best}
    whole = {number: with_more(_passes(took[number]), found[number], machine).value for number in best}
    room = machine.free_memory_bytes
    for number in sorted(best, key=lambda one: (whole[one], one != own)):
        if number == own:
            break
        needed = _most_bytes(found[number], machine)
        if needed <= room or needed <= _most_bytes(work, machine):
            return found[number]
    return work


def _with(work: Training, layers: Sequence[range], zeros: bool) -> Training:
    """`work` with `layers` for each stage."""
    assert work.pipeline is not None
    pipeline = work.pipeline.cut(layers, "the simulated seconds of a step")
    update: UpdateCost = pipeline.updates[pipeline.largest]
    return replace(work, pipeline=pipeline, update=masked(update, work.model) if zeros else update)


def _ranges(row: NDArray[np.int64]) -> list[range]:
    """The layers of each stage of a cut."""
    places = row.tolist()
    return [range(begin, end) for begin, end in pairwise(places)]


def _passes(value: float) -> Estimate:
    return Estimate(value=float(value), unit="s", formula="")


def _most_bytes(work: Training, machine: Machine) -> float:
    """Bytes that the training adds on the rank that needs most."""
    assert work.pipeline is not None
    return max(one.value for one in bytes_by_rank(work, work.pipeline, machine.device))


class _Simulated:
    """Seconds of the passes and the largest update of a step with each of many cuts.

    What a stage or a rank takes depends on how many layers of each kind it has, and on whether the first and the last one are
    there, so it is computed once for each such content.
    """

    def __init__(self, work: Training, pipeline: Pipelined, machine: Machine) -> None:
        self.work, self.pipeline, self.machine = work, pipeline, machine
        self.options = play_options(work, machine)
        kinds, each = [], []
        count, again = work.model.num_layers, work.recomputed
        for index, layer in enumerate(pipeline.dims.layers):
            kind = layer, again.count(index)
            kinds += [] if kind in kinds else [kind]
            each.append(kinds.index(kind))
        self.before = np.zeros((count + 1, len(kinds) + 2), np.int64)
        """Of the layers before each one: how many of each kind, and whether the first and the last are among them."""
        for index, kind in enumerate(each):
            self.before[index + 1] = self.before[index]
            self.before[index + 1, kind] += 1
        self.before[1:, -2], self.before[count, -1] = 1, 1
        self.passes: dict[bytes, tuple[float, float, float]] = {}
        self.updates: dict[bytes, float] = {}

    def __call__(self, cuts: Cuts) -> NDArray[np.float64]:
        """float64 [N]."""
        table, dtype = self.pipeline.table, self.work.dtype
        content = np.diff(self.before[cuts], axis=1)  # [N, stages, kinds + 2]
        keys, firsts, places = _unique(content.reshape(-1, content.shape[2]))
        for key, place in zip(keys, firsts, strict=True):
            if key not in self.passes:
                row, stage = divmod(int(place), content.shape[1])
                self.passes[key] = self.pipeline.passes_s(_ranges(cuts[row])[stage], self.machine, **self.options)
        stages = np.array([self.passes[key] for key in keys])[places].reshape(*content.shape[:2], 3)
        forward, inputs, weights = np.ascontiguousarray(stages.transpose(2, 1, 0))
        sent = self.pipeline.sent_s(self.machine, self.work.micro_batch_tokens, dtype)
        return seconds_of_many(table, {"F": forward, "I": inputs, "W": weights}, sent) + self._updates(cuts, content)

    def _updates(self, cuts: Cuts, content: NDArray[np.int64]) -> NDArray[np.float64]:
        """The seconds of the largest update, [N]."""
        held = [self.pipeline.table.held(rank) for rank in range(len(self.pipeline.table.ranks))]
        ranks = np.stack([content[:, own].sum(axis=1) for own in held], axis=1)
        keys, firsts, places = _unique(ranks.reshape(-1, ranks.shape[2]))
        for key, place in zip(keys, firsts, strict=True):
            if key not in self.updates:
                row, rank = divmod(int(place), len(held))
                layers = _ranges(cuts[row])
                part = dims_of_layers(self.pipeline.dims, [layers[stage] for stage in held[rank]])
                update = updated(self.work, self.pipeline.update(part))
                self.updates[key] = update_seconds(update, part, self.machine, self.work.dtype).value
        return np.array([self.updates[key] for key in keys])[places].reshape(len(cuts), -1).max(axis=1)


def _unique(rows: NDArray[np.int64]) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """The different `rows` as bytes, where each is first, and which of them every row is."""
    found, firsts, places = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return [one.tobytes() for one in found], firsts, places.reshape(-1)
