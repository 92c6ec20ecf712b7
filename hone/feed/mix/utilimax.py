"""UtiliMax mixture: a portfolio of sources by their utility for each task, with a penalty on concentration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import MissingExtra, SpecError
from hone.feed.mix.base import Chosen, Mixture, Source, shares
from hone.feed.mix.utilities import Table, read_runs, read_table, run_files, scale

_TOLERANCE = 1e-11
_LOOSE = 1e-6


class Portfolio(Mixture):
    """The common part of UtiliMax and MEDU: weights from utilities. A subclass computes the utilities."""

    risk: float = Field(1.0, ge=0, description="Penalty on concentration: risk x sources x the sum of squared weights.")

    def utilities(self, sources: Sequence[Source]) -> tuple[np.ndarray, list[str], dict[str, Any]]:
        """(utilities float64 [sources, tasks] in 0..1, tasks, notes)."""
        raise NotImplementedError

    def weigh(self, sources: Sequence[Source], budget: float) -> Chosen:
        """The weights that bring every task's utility nearest to 1, with the penalty `risk`, under the caps."""
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
        default_factory=dict, description="Folder of a run trained on each source alone; instead of a table."
    )
    tasks: tuple[str, ...] = Field((), description="Figures of the runs to compare; none: the losses by source.")
    lower_is_better: bool = Field(True, description="Whether the numbers are losses.")

    def utilities(self, sources: Sequence[Source]) -> tuple[np.ndarray, list[str], dict[str, Any]]:
        return *scale(self._values(), sources, self.lower_is_better), {}

    def _values(self) -> Table:
        if (self.table is None) == (not self.runs):
            raise SpecError(
                "utilimax needs utilities: either mixture.table or mixture.runs",
                fix="add table: FILE.json, or runs: {SOURCE: FOLDER OF A TRAINING ON IT ALONE}",
            )
        return read_runs(self.runs, self.tasks) if self.table is None else read_table(self.table)

    def files(self) -> dict[str, Path]:
        table = {} if self.table is None else {"mixture.table": Path(self.table).expanduser()}
        return {**table, **run_files(self.runs)}


def best_portfolio(utility: np.ndarray, caps: np.ndarray, risk: float) -> np.ndarray:
    """argmin |utility^T w - 1|_2 + risk * n * |w|^2 over sum w = 1, 0 <= w <= caps, with the conic solver clarabel.

    utility float64 [n, tasks], caps float64 [n] whose sum is at least 1. The norm has no gradient where it is 0, which
    is the optimum when one source is best at every task: an interior-point method for second-order cones needs no gradient.
    The objective is at most 1e-6 above the optimum, relative where that is above 1. Raises MissingExtra without clarabel.
    """
    try:
        import clarabel
    except ImportError:
        raise MissingExtra.of("this mixture", "clarabel", "data") from None
    from scipy import sparse

    n, num_tasks = utility.shape
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = _TOLERANCE
    scale = 1 / (1 + 2 * risk * n)  # the solver is most accurate with numbers near 1
    # Variables (w, t), t >= |utility^T w - 1|: minimise t + risk n |w|^2, with b - A (w, t) in the cones.
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(2 * n), clarabel.SecondOrderConeT(1 + num_tasks)]
    on_weights = np.vstack([np.ones(n), -np.eye(n), np.eye(n), np.zeros(n), -utility.T])
    on_norm = np.zeros(len(on_weights))
    on_norm[1 + 2 * n] = -1
    solution = clarabel.DefaultSolver(
        sparse.diags([2 * risk * n * scale] * n + [0.0], format="csc"),
        np.append(np.zeros(n), scale),
        sparse.csc_matrix(np.column_stack([on_weights, on_norm])),
        np.concatenate([[1.0], np.zeros(n), caps, [0.0], -np.ones(num_tasks)]),
        cones,
        settings,
    ).solve()
    weights = np.clip(np.array(solution.x[:n]), 0, caps)
    room = caps - weights if weights.sum() < 1 else weights  # the rounding error of the sum goes where the bounds allow
    weights += (1 - weights.sum()) * room / max(room.sum(), 1e-300)
    value = float(np.linalg.norm(weights @ utility - 1) + risk * n * (weights @ weights))
    above = value - solution.obj_val_dual / scale  # the dual objective is a lower bound
    assert above <= _LOOSE * max(value, 1), f"clarabel ended {above:g} above its bound of {value:g}: {solution.status}"
    return weights
