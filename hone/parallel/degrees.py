"""The number of ranks along each axis of a training, and which ranks are together along some of the axes. Never imports torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import NamedTuple

from hone.base.errors import SpecError


class Degrees(NamedTuple):
    """Ranks along each axis, outermost first: ranks of the last axis are neighbours, on one machine where there are several.

    pp: pipeline stages. dp_replicate: groups of ranks that each hold all state of their stage. dp_shard: ranks of such a
    group. ep: ranks that each hold a part of the experts of every layer, and are data-parallel ranks for all other weights. cp:
    ranks that each compute a part of every sequence. tp: ranks that each compute a part of every layer. Rank
    (p, r, s, e, c, t) has the number ((((p * dp_replicate + r) * dp_shard + s) * ep + e) * cp + c) * tp + t.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return math.prod(self)

    @property
    def dp(self) -> int:
        """Ranks among which a batch is divided."""
        return self.dp_replicate * self.dp_shard * self.ep

    def place(self, rank: int) -> Degrees:
        """The indices of `rank` along the axes."""
        indices = []
        for degree in reversed(self):
            rank, index = divmod(rank, degree)
            indices.append(index)
        return Degrees(*reversed(indices))

    def lines(self, axes: Collection[str]) -> list[list[int]]:
        """All ranks, in groups of those that differ along `axes` alone, in the order of the ranks."""
        inside = [range(degree) if name in axes else (0,) for name, degree in zip(self._fields, self, strict=True)]
        outside = [(0,) if name in axes else range(degree) for name, degree in zip(self._fields, self, strict=True)]
        steps = [math.prod(self[place + 1 :]) for place in range(len(self))]

        def number(place: tuple[int, ...]) -> int:
            return sum(index * step for index, step in zip(place, steps, strict=True))

        offsets = [number(one) for one in itertools.product(*inside)]
        return [[number(first) + offset for offset in offsets] for first in itertools.product(*outside)]


def data_ranks(num_ranks: int, **degrees: int) -> int:
    """The ranks of `num_ranks` that are left for data parallelism; `degrees` are those of the other axes by their field.

    Raises SpecError when they do not divide `num_ranks`.
    """
    taken = math.prod(degrees.values())
    if num_ranks % taken:
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        raise SpecError(
            f"{shown} do{'es' if ' x ' not in shown else ''} not divide {num_ranks} ranks",
            fix=f"start a multiple of {taken} ranks, plan for them with --plan --mesh={taken}, or lower parallelism.{shown.partition(' ')[0]}",
        )
    return num_ranks // taken
