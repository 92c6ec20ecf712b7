"""The masks of one step's sequences, filled when its forward pass is on its way and the last step's tokens are known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hone.base.errors import HoneError
from hone.serve.structured.constraint import MASK_S, Constraint
from hone.serve.structured.grammars import library

if TYPE_CHECKING:
    from hone.serve.sequence import ScheduledSeq

MOST_THREADS = 8
"""Threads that fill masks: a few hundred sequences then take a few milliseconds, while the device computes."""


class StepMasks:
    """What `Runner.launch` asks for masks. `read` applies the results of the step before, which masks depend on."""

    def __init__(self, scheduled: Sequence[ScheduledSeq], read: Callable[[Sequence[ScheduledSeq]], None]) -> None:
        self._scheduled = scheduled
        self._read = read
        self.asked = False
        """Whether the runner came to the point of sampling."""
        self.errors: dict[int, str] = {}
        """By place in the step: why a sequence has no mask; its token is then not to be used."""

    def __call__(self) -> np.ndarray:
        """int32 [M, ceil(V / 32)]: the masks of the sequences that have a constraint, in the step's order."""
        if not self.asked:  # a step that fails after this runs again in halves
            self.asked = True
            self._read(self._scheduled)
        given = [
            (index, item, one) for index, item in enumerate(self._scheduled) if (one := item.seq.constraint) is not None
        ]
        masks = np.full((len(given), given[0][2].num_words), -1, dtype=np.int32)
        # Not those that were ended by the tokens just read.
        live = [row for row, (_, item, _) in enumerate(given) if item.samples and item.seq.state != "done"]
        asked = ask_together([given[row][2] for row in live], live, masks)
        for row in live:
            index, _, constraint = given[row]
            try:
                constraint.fill(masks[row], asked=row in asked)
            except HoneError as error:
                self.errors[index] = f"{type(error).__name__}: {error}"
                masks[row] = -1
        return masks


@cache
def _executor() -> Any:
    return library().LLExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))


def ask_together(constraints: Sequence[Constraint], rows: Sequence[int], masks: np.ndarray) -> set[int]:
    """Fills the grammars' masks of several constraints in parallel; returns the rows that are filled.

    One that takes long is then asked alone, which tells it from the others (`Constraint.fill` ends it).
    """
    some = [(one, row) for one, row in zip(constraints, rows) if one.asks and one.fits and not one.suspected]
    if len(some) < 2:
        return set()
    began = time.perf_counter()
    _executor().unsafe_compute_mask_ptr(
        [(one.matcher, row) for one, row in some], masks.ctypes.data, 4 * masks.shape[1], len(masks)
    )
    if time.perf_counter() - began > MASK_S:
        for one, _ in some:
            one.suspected = True
    return {row for _, row in some}
