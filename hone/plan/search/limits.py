"""The limits of a goal: which configurations keep them, which limits bind, and what each would have to be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.base.figure import human_bytes, human_seconds

Array = NDArray[np.float64]


class Limit(NamedTuple):
    """The most that an amount may be, or with `least` the least."""

    name: str
    bound: float
    unit: str
    least: bool = False

    def keeps(self, values: Array) -> NDArray[np.bool_]:
        """Where the limit is kept; an unknown value keeps none."""
        return values >= self.bound if self.least else values <= self.bound

    def excess(self, values: Array) -> Array:
        """How many times the limit the values are, above 1 where it is broken; infinite where unknown."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.bound / values if self.least else values / self.bound
        return np.where(np.isnan(found), np.inf, found)

    def said(self, value: float) -> str:
        """`value` in its unit."""
        if not np.isfinite(value):
            return "unknown"
        if self.unit == "B":
            return human_bytes(value)
        if self.unit == "s":
            return f"{value * 1e3:.3g} ms" if value < 1 else human_seconds(value)
        return f"${value:,.2f}" if self.unit == "$" else f"{value:,.3g} {self.unit}"


class Broken(NamedTuple):
    """The configuration that breaks the limits `names`, and no other, by least: what each would have to be, and its row."""

    names: tuple[str, ...]
    excess: float
    values: tuple[float, ...]
    row: Any


@dataclass
class Tally:
    """What happened to the configurations of a search: how many were priced, and why the others were not kept."""

    limits: tuple[Limit, ...]
    rejected: Counter[str] = field(default_factory=Counter)
    priced: int = 0
    """Configurations whose seconds and bytes were computed."""
    asked: int = 0
    """All combinations of the axes."""
    nearest: dict[tuple[str, ...], Broken] = field(default_factory=dict)

    def keep(self, values: dict[str, Array], row_of: Any) -> NDArray[np.bool_]:
        """Where all limits are kept; counts each other row by the first limit it breaks, and remembers those that break fewest.

        `values` by the names of limits, arrays of equal length; limits of what is not there are not asked. `row_of(index)` describes
        a row.
        """
        count = len(next(iter(values.values())))
        self.priced += count
        limits = [one for one in self.limits if one.name in values]
        fine = {one.name: one.keeps(values[one.name]) for one in limits}
        good = np.ones(count, bool)
        for one in limits:
            self.rejected[f"breaks the limit of {one.name}"] += int((good & ~fine[one.name]).sum())
            good &= fine[one.name]
        if not good.any():
            self._nearest(values, fine, row_of)
        return good

    def _nearest(self, values: dict[str, Array], fine: dict[str, NDArray[np.bool_]], row_of: Any) -> None:
        limits = [one for one in self.limits if one.name in fine]
        for size in (1, 2, len(limits)):
            found = False
            for some in combinations(limits, min(size, len(limits))):
                names = tuple(one.name for one in some)
                rows = np.ones(len(fine[names[0]]), bool)
                for one in limits:
                    if one.name not in names:
                        rows &= fine[one.name]
                worst = np.max([one.excess(values[one.name]) for one in some], axis=0)
                worst = np.where(rows, worst, np.inf)
                at = int(worst.argmin())
                if not np.isfinite(worst[at]):
                    continue
                found = True
                before = self.nearest.get(names)
                if before is None or worst[at] < before.excess:
                    needs = tuple(float(values[name][at]) for name in names)
                    self.nearest[names] = Broken(names, float(worst[at]), needs, row_of(at))
            if found:
                return

    def limit(self, name: str) -> Limit:
        """The limit of that name."""
        return next(one for one in self.limits if one.name == name)

    def binding(self) -> list[Broken]:
        """What stood in the way where nothing was kept: the broken sets of fewest limits, the least excess first."""
        if not self.nearest:
            return []
        fewest = min(len(one) for one in self.nearest)
        return sorted((one for one in self.nearest.values() if len(one.names) == fewest), key=lambda one: one.excess)
