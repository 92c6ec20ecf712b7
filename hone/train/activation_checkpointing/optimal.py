"""Optimal checkpointing of a chain of layers by dynamic programming: the fewest seconds of recomputation within given bytes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import FitError
from hone.base.figure import human_bytes
from hone.cost.activations.segments import LayerBytes, Segment
from hone.train.activation_checkpointing.base import ActivationCheckpointing, Segments, Sizes, said

SLOTS = 128
"""Parts into which memory is divided, at least; sizes are rounded up to whole ones."""

SLOTS_A_LAYER = 8
"""The same for each layer of a deep model, so that rounding stays small."""

KEEP, SELECT = 0, 1
"""Choices for the first layer of a chain; SELECT + d is a segment of d layers from it."""


class Optimal(ActivationCheckpointing):
    """The fastest mix of kept, selectively and fully recomputed layers in nested segments within given bytes, by dynamic programming. Beaumont et al. 2019, arXiv:1911.13214."""

    paper: ClassVar[str] = "arXiv:1911.13214"
    memory_bytes: float | None = Field(
        None, gt=0, description="Bytes that the whole training may add to the device's memory; empty: what is free."
    )
    selective: bool = Field(True, description="Layers may also keep the results of their matmuls and attention.")

    def segments(self, num_layers: int, sizes: Sizes | None = None) -> Segments:
        """The plan of the most bytes of activations with which the whole training fits.

        Raises FitError where `memory_bytes` is less than the smallest plan needs.
        """
        sizes = self.needed(sizes)
        budget = sizes.free_bytes if self.memory_bytes is None else self.memory_bytes
        chain = Chain(sizes, selective=self.selective)
        found = [chain.segments(slots) for slots in range(chain.slots + 1)]
        plans = list(dict.fromkeys(one for one in found if one is not None))
        fitting = [one for one in plans if sizes.growth(one) <= budget]
        if fitting:
            return min(fitting, key=sizes.seconds)
        least = min(plans, key=sizes.growth)
        if self.memory_bytes is None:
            return least  # the plan says that it does not fit
        raise FitError(
            f"activation_checkpointing.memory_bytes {self.memory_bytes:.4g} is {human_bytes(self.memory_bytes)}; the least "
            f"this training can do with is {human_bytes(sizes.growth(least))}",
            fix=sizes.ways(least, self.memory_bytes),
        )

    def notes(self, num_layers: int, sizes: Sizes) -> tuple[str, ...]:
        return (f"activation_checkpointing {self.kind}: {said(self.segments(num_layers, sizes), sizes)}",)

    def check(self, *, compile: bool, stages: int) -> None:
        """A compiled layer cannot be recomputed selectively."""
        super().check(compile=compile, stages=stages)
        if compile and self.selective:
            raise ValueError(f"compile does not work with activation_checkpointing {self.kind} and selective: true")


class Chain:
    """The table of best plans for layers i to j with m slots of memory.

    The input of the first layer is held by the caller. Layer i is kept (its activations stay until its own backward
    pass), or keeps the results of its products, or begins a segment i to k of which only the input stays: then the layers
    from k on run forward and backward first, and the segment again with the same memory, itself planned like a chain.
    Layers with equal sizes share their tables.
    """

    def __init__(self, sizes: Sizes, *, selective: bool) -> None:
        layers = sizes.layers
        top = sum(one.saved for one in layers) + max(one.making for one in layers)
        self.layers, self.num = layers, len(layers)
        self.slots = max(SLOTS, SLOTS_A_LAYER * self.num)
        self.slot = top / (self.slots - 2 * self.num - 1)  # all kept fits, in spite of rounding
        self.kept = [self._slots(one.saved - one.entry) for one in layers]
        self.entry = [self._slots(one.entry) for one in layers] + [0]
        self.own = [self._slots(one.saved - one.entry + one.making) for one in layers]
        self.products = [self._slots(one.products - one.entry) for one in layers] if selective else None
        self.forward_s, self.replay_s = sizes.forward_s, sizes.replay_s
        self.cost: dict[tuple[object, ...], np.ndarray] = {}
        self.choice: dict[tuple[object, ...], np.ndarray] = {}
        kinds: dict[tuple[LayerBytes, float], int] = {}
        self.kinds = [kinds.setdefault(key, len(kinds)) for key in zip(layers, sizes.forward_s, strict=True)]
        for length in range(1, self.num + 1):
            for start in range(self.num - length + 1):
                self._solve(start, start + length)

    def segments(self, slots: int) -> Segments | None:
        """The plan of all layers with `slots`; None where there is none."""
        if not np.isfinite(self.cost[self._key(0, self.num)][slots]):
            return None
        return self._plan(0, self.num, slots)

    def _slots(self, num_bytes: float) -> int:
        return int(np.ceil(max(num_bytes, 0.0) / self.slot - 1e-9))

    def _key(self, start: int, stop: int) -> tuple[object, ...]:
        return (stop == self.num, *self.kinds[start:stop])

    def _rest(self, start: int, stop: int, held: int) -> np.ndarray:
        """Costs of the chain `start` to `stop` when `held` slots, and its input's if there is one, are taken."""
        if start == stop:
            costs, taken = np.zeros(self.slots + 1), held
        else:
            costs, taken = self.cost[self._key(start, stop)], held + self.entry[start]
        found = np.full(self.slots + 1, np.inf)
        if taken <= self.slots:
            found[taken:] = costs[: self.slots + 1 - taken]
        return found

    def _solve(self, start: int, stop: int) -> None:
        key = self._key(start, stop)
        if key in self.cost:
            return
        fits = np.arange(self.slots + 1) >= self.own[start]
        options = {KEEP: np.where(fits, self._rest(start + 1, stop, self.kept[start]), np.inf)}
        if self.products is not None:
            rest = self._rest(start + 1, stop, self.products[start]) + self.replay_s[start]
            options[SELECT] = np.where(fits, rest, np.inf)
        for middle in range(start + 1, stop):
            again = sum(self.forward_s[start:middle]) + self.cost[self._key(start, middle)]
            options[SELECT + middle - start] = self._rest(middle, stop, 0) + again
        costs = np.stack(list(options.values()))
        best = costs.argmin(0)
        self.cost[key] = costs[best, np.arange(self.slots + 1)]
        self.choice[key] = np.array(list(options))[best]

    def _plan(self, start: int, stop: int, slots: int) -> Segments:
        if start == stop:
            return ()
        choice = int(self.choice[self._key(start, stop)][slots])
        if choice in (KEEP, SELECT):
            first = Segment(start, start + 1, choice == SELECT, saves="products" if choice == SELECT else "input")
            held = self.kept[start] if choice == KEEP or self.products is None else self.products[start]
            return (first, *self._plan(start + 1, stop, slots - held - self._entry(start + 1, stop)))
        middle = start + choice - SELECT
        inner = self._plan(start, middle, slots)
        if all(not one.recompute for one in inner):
            inner = ()
        first = Segment(start, middle, True, inner)
        return (first, *self._plan(middle, stop, slots - self._entry(middle, stop)))

    def _entry(self, start: int, stop: int) -> int:
        return 0 if start == stop else self.entry[start]
