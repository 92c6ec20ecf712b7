"""UtiliMax mixture: a portfolio of sources, by what each is worth for each task and how far it spreads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import SpecError
from hone.data.mix.base import Chosen, Mixture, Source, shares
from hone.data.mix.simplex import project
from hone.data.mix.utilities import Table, read_runs, read_table, run_files, scale

_STEPS = 5000
_TIGHT = 1e-12
_LOOSE = 1e-5
_PATIENCE = 300


class Portfolio(Mixture):
    """What UtiliMax and MEDU share: utilities in, weights out. A subclass says where utilities come from."""

    risk: float = Field(
        1.0, ge=0, description="Price of putting all on few sources: risk x sources x the sum of squared weights."
    )

    def utilities(self, sources: Sequence[Source]) -> tuple[np.ndarray, list[str], dict[str, Any]]:
        """(utilities float64 [sources, tasks] in 0..1, tasks, notes)."""
        raise NotImplementedError

    def weigh(self, sources: Sequence[Source], budget: float) -> Chosen:
        """The weights that bring every task's utility nearest to 1, at the price of `risk`, under the caps."""
        caps = self.caps(sources, budget)
        utility, tasks, more = self.utilities(sources)
        free = best_portfolio(utility, np.ones(len(sources)), self.risk)
        weights = best_portfolio(utility, caps, self.risk)
        means = utility.mean(1)
        reasons = []
        for row, mean in zip(utility, means):
            best = int(np.argmax(row))
            reasons.append(f"utility {mean:.3f} over {len(tasks)} tasks, most for {tasks[best]} ({row[best]:.3f})")
        known = {source.name: dict(zip(tasks, row.tolist())) for source, row in zip(sources, utility)}
        reached = dict(zip(tasks, (weights @ utility).tolist()))
        rows = shares(sources, budget, free, weights, caps, [float(mean) for mean in means], reasons)
        return Chosen(rows, {"utilities": known, "reached": reached, **more})


class UtiliMax(Portfolio):
    """Minimises |w U - 1| + risk x n |w|^2 under caps on epochs. Held et al. 2025, arXiv:2501.11747.

    U holds each source's utility for each task, 0 the worst and 1 the best source, from a table or from training runs
    on one source each (a fixed mixture with one weight), which record their loss on every source.
    """

    paper: ClassVar[str] = "arXiv:2501.11747"
    table: str | None = Field(None, description="JSON file {source: {task: number}} of utilities or losses.")
    runs: dict[str, str] = Field(
        default_factory=dict, description="Source to the folder of a run trained on it alone; instead of a table."
    )
    tasks: tuple[str, ...] = Field((), description="Figures of the runs to compare by; none: the losses by source.")
    lower_is_better: bool = Field(True, description="Whether the numbers are losses.")

    def utilities(self, sources: Sequence[Source]) -> tuple[np.ndarray, list[str], dict[str, Any]]:
        return *scale(self._values(), sources, self.lower_is_better), {}

    def _values(self) -> Table:
        if (self.table is None) == (not self.runs):
            raise SpecError(
                "utilimax needs utilities: mixture.table or mixture.runs, one of them",
                fix="add table: FILE.json, or runs: {SOURCE: FOLDER OF A TRAINING ON IT ALONE}",
            )
        return read_runs(self.runs, self.tasks) if self.table is None else read_table(self.table)

    def files(self) -> dict[str, Path]:
        table = {} if self.table is None else {"mixture.table": Path(self.table).expanduser()}
        return {**table, **run_files(self.runs)}


def best_portfolio(utility: np.ndarray, caps: np.ndarray, risk: float) -> np.ndarray:
    """argmin |utility^T w - 1|_2 + risk * n * |w|^2 over sum w = 1, 0 <= w <= caps, by accelerated projected gradient.

    utility float64 [n, tasks], caps float64 [n]. The problem is convex; a step is halved until it keeps its promise,
    momentum starts again when it turns uphill. Ends when the duality gap, which bounds the distance from the least
    value, is below 1e-12, or at what the float64 arithmetic lets it reach.
    """
    n = len(caps)

    def value(w: np.ndarray) -> float:
        return float(np.linalg.norm(w @ utility - 1) + risk * n * (w @ w))

    def slope(w: np.ndarray) -> np.ndarray:
        rest = w @ utility - 1
        size = float(np.linalg.norm(rest))
        return (utility @ rest / size if size > 1e-12 else np.zeros(n)) + 2 * risk * n * w

    w = project(np.full(n, 1 / n), caps)
    best, least = gap(slope(w), w, caps), w
    ahead, momentum, step, since = w, 1.0, 1.0, 0
    for _ in range(_STEPS):
        at, gradient = value(ahead), slope(ahead)
        step *= 2
        while True:
            after = project(ahead - step * gradient, caps)
            move = after - ahead
            if value(after) <= at + gradient @ move + (move @ move) / (2 * step) + 1e-16 or step < 1e-14:
                break
            step /= 2
        if (now := gap(slope(after), after, caps)) < best:
            best, least = now, after
            since = 0
        since += 1
        if best <= _TIGHT or since > _PATIENCE:
            break
        if gradient @ (after - w) > 0 and momentum > 1:
            ahead, momentum = w, 1.0  # uphill: start again without momentum
            continue
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = after + (momentum - 1) / following * (after - w)
        w, momentum = after, following
    assert best <= _LOOSE, f"the portfolio is {best:g} above its optimum after {_STEPS} steps"
    return least


def gap(gradient: np.ndarray, weights: np.ndarray, caps: np.ndarray) -> float:
    """How much a linear function with this gradient could still fall under the caps: a convex one not by more."""
    order = np.argsort(gradient, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(caps[order])[:-1]])
    lowest = np.zeros(len(caps))
    lowest[order] = np.clip(1 - before, 0, caps[order])
    return float(gradient @ (weights - lowest))
