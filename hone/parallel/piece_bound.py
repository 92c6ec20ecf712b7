"""How many rows of experts a rank may send to another one in a pass whose host does not wait to learn how many there are.

Memory and transfers have sizes, and a router decides on the device how many rows go where. A host that reads that number waits for the device in
every layer, and has then nothing given to it in advance. Loads change little from step to step, so every piece gets the same fixed room
instead: a little more than the largest piece of the passes before. Numbers of rows reach the host later, where it has already given all of the
forward pass to the device. Where a piece had more rows than room, the pass is made once more with the exact sizes: no row is ever left out.
Legend: n ranks, E experts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

SLACK, EDGE, LOOSE = 1.0625, 1.02, 1.25
"""A new room is SLACK times the largest piece. It is made anew where that piece times EDGE does not fit, or where it is more than LOOSE times the piece."""

STEP = 128
"""Rooms are multiples of so many rows: a tile of the products."""


class Counted(NamedTuple):
    """How many rows each rank has for each expert, int64 [n, E], on their way to the host."""

    every: Tensor
    event: Any
    """After which they are there; None: they are."""
    room: int | None
    """The rows that each piece had room for; None: as many as it had."""

    def rows(self) -> list[list[int]]:
        """The rows that each rank gives to each rank; on a GPU the host waits here until it knows."""
        if self.event is not None:
            self.event.synchronize()
        size = len(self.every)
        return self.every.view(size, size, -1).sum(2).tolist()  # type: ignore[no-any-return]


class PieceBound:
    """The room of pieces of an exchange: all of its ranks see the same numbers, so that all decide alike."""

    def __init__(self) -> None:
        self.rows: int | None = None
        """The room of a piece, of which the next pass may make use; None: no pass was counted yet."""
        self.room: int | None = None
        """The room of pieces that are sent now; None: the host waits for their exact sizes."""
        self.open = False
        """Whether layers tell their counts: somebody calls `settle` before the results of their pass count."""
        self.overflows = 0
        """Passes that had to be made once more."""
        self._under_way: list[Counted] = []

    def begin(self) -> None:
        """A pass begins, whose pieces have the room that is known until now: it stays the same where layers are computed again."""
        self.open, self.room = True, self.rows

    def counted(self, counts: Counted) -> None:
        """A layer's counts that `settle` is to read."""
        self._under_way.append(counts)

    def close(self) -> None:
        """From now on sizes are exact, and counts that were not read are of no use."""
        self.open, self.room, self._under_way = False, None, []

    def settle(self) -> bool:
        """Reads the counts of all layers since the last call, for which the host may wait; whether a piece had more rows than room."""
        every, self._under_way = self._under_way, []
        if not every:
            return False
        largest = [max(map(max, one.rows())) for one in every]
        most, rows = max(max(largest), 1), self.rows
        if rows is None or most * EDGE > rows or most * LOOSE < rows:
            self.rows = math.ceil(most * SLACK / STEP) * STEP
        over = any(one.room is not None and count > one.room for one, count in zip(every, largest, strict=True))
        self.overflows += over
        return over
