"""A choice of one option for every item, with losses of single items and of pairs, within a budget of bytes.

Shapes: n items, o options of an item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass
class Pairwise:
    """sizes [n][o] bytes; losses [n][o]; pairs {(i, j), i < j: [o_i, o_j]}, what the two lose together beyond the sum; budget bytes.

    `evaluations` counts how often a solver asked for the loss of a whole choice or of a change of it.
    """

    sizes: Sequence[Sequence[int]]
    losses: Sequence[Sequence[float]]
    pairs: Mapping[tuple[int, int], Floats]
    budget: int
    evaluations: int = 0
    near: list[dict[int, Floats]] = field(init=False)
    """For each item the pairs that it is in, as {other item: [o_item, o_other]}."""

    def __post_init__(self) -> None:
        self.near = [{} for _ in self.sizes]
        for (one, other), table in self.pairs.items():
            assert one < other, "pairs are given once, the lower item first"
            self.near[one][other] = np.asarray(table, float)
            self.near[other][one] = np.asarray(table, float).T

    def __len__(self) -> int:
        return len(self.sizes)

    def size(self, choice: Sequence[int]) -> int:
        """Bytes of a choice, an option's place for each item."""
        return sum(sizes[at] for sizes, at in zip(self.sizes, choice, strict=True))

    def loss(self, choice: Sequence[int]) -> float:
        """Of single items and of all pairs."""
        self.evaluations += 1
        total = sum(losses[at] for losses, at in zip(self.losses, choice, strict=True))
        return total + sum(float(table[choice[one], choice[other]]) for (one, other), table in self.pairs.items())

    def change(self, choice: Sequence[int], item: int, option: int) -> float:
        """What the loss gains when `item` takes `option` instead of its own in `choice`."""
        self.evaluations += 1
        before = choice[item]
        gain = self.losses[item][option] - self.losses[item][before]
        for other, table in self.near[item].items():
            gain += table[option, choice[other]] - table[before, choice[other]]
        return float(gain)

    def smallest(self) -> list[int] | None:
        """The option of fewest bytes for each item; None where even these exceed the budget."""
        choice = [min(range(len(sizes)), key=sizes.__getitem__) for sizes in self.sizes]
        return choice if self.size(choice) <= self.budget else None
