"""All jobs at once as a mixed-integer program that HiGHS solves: the optimum that other placements are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hone.base.errors import FitError, MissingExtra
from hone.plan.carbon.grid import Grid
from hone.plan.carbon.jobs import Job
from hone.plan.carbon.place import capacity
from hone.plan.carbon.slots import Piece, Slots


class _Rows:
    """Variables with their costs and bounds, and the rows of constraints, as triplets."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.triplets: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float, upper: float, integral: bool) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.cost) - 1

    def row(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        number = len(self.low)
        self.triplets += [(number, column, factor) for column, factor in terms]
        self.low.append(low)
        self.high.append(high)

    def solve(self, limit_s: float) -> Any:
        MissingExtra.need("method: exact", "scipy", "models")
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows, columns, factors = zip(*self.triplets)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.low), len(self.cost)))
        return milp(
            np.array(self.cost),
            integrality=np.array(self.integral),
            bounds=Bounds(0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
        )


class Optimum:
    """The optimum of `grid`: `placed` by job, `value` in its objective's unit, `bound` below which none can be, `proven`.

    With `jobs` and `room` [sites, slots] it is of these jobs alone, in devices that others leave.
    """

    def __init__(
        self,
        grid: Grid,
        limit_s: float | None = None,
        jobs: Sequence[Job] | None = None,
        room: np.ndarray | None = None,
    ) -> None:
        self.grid = grid
        self.rows = _Rows()
        self.taken: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self.parts = {job.name: self._add(job) for job in (grid.spec.jobs if jobs is None else jobs)}
        room = capacity(grid) if room is None else room
        for (site, slot), terms in self.taken.items():
            if np.isfinite(room[site, slot]):
                self.rows.row(terms, 0.0, float(room[site, slot]))
        found = self.rows.solve(limit_s or grid.spec.limit_s)
        if found.x is None:
            raise FitError(
                f"HiGHS found no placement of all {len(self.parts)} jobs in {limit_s or grid.spec.limit_s:g} s: {found.message}",
                fix="raise limit_s, move deadlines, or give sites more devices; or set method: groups",
            )
        self.value = float(found.fun)
        self.bound = float(found.mip_dual_bound) if found.mip_dual_bound is not None else self.value
        self.proven = found.status == 0
        self.placed = {name: self._pieces(part, found.x) for name, part in self.parts.items()}

    def _add(self, job: Job) -> dict[str, Any]:
        slots = self.grid.slots(job, np.full(self.grid.grams.shape, np.inf))
        if job.mode == "whole":
            return self._add_whole(job, slots)
        if job.mode == "elastic":
            return self._add_elastic(job, slots)
        if slots.move_cost is None and slots.restart_h == 0:
            return self._add_stay(job, slots)
        return self._add_moving(job, slots)

    def _use(self, site: int, slot: int, variable: int, devices: float) -> None:
        self.taken.setdefault((site, slot), []).append((variable, devices))

    def _add_whole(self, job: Job, slots: Slots) -> dict[str, Any]:
        """One binary variable a start."""
        step = slots.step_h
        count = int(np.ceil(job.hours / step - 1e-9))
        parts = [step] * (count - 1) + [job.hours - step * (count - 1)]
        starts = {}
        for site in self.grid.sites(job):
            begin, end = self.grid.span(job)
            for first in range(max(0, begin), min(end, self.grid.num_slots) - count + 1):
                cost = slots.cost[site, first : first + count]
                if np.isfinite(cost).all():
                    chosen = starts[site, first] = self.rows.variable(float(cost @ parts), 1, True)
                    for slot in range(first, first + count):
                        self._use(site, slot, chosen, job.devices)
        self._one_of(job, [*starts.values()])
        return {"starts": starts, "parts": parts}

    def _one_of(self, job: Job, variables: list[int]) -> None:
        if not variables:
            raise FitError(
                f"job {job.name} fits nowhere before its deadline", fix="move its deadline, or allow it more sites"
            )
        self.rows.row([(one, 1.0) for one in variables], 1.0, 1.0)

    def _add_stay(self, job: Job, slots: Slots) -> dict[str, Any]:
        """A site, hours of work in each slot, and whether the slot is taken."""
        work, per_site = {}, []
        for site in self.grid.sites(job):
            chosen, hours = self.rows.variable(0.0, 1, True), []
            for slot in np.flatnonzero(np.isfinite(slots.cost[site])):
                worked = self.rows.variable(float(slots.cost[site, slot]), slots.step_h, False)
                busy = self.rows.variable(0.0, 1, True)
                self.rows.row([(worked, 1.0), (busy, -slots.step_h)], -np.inf, 0.0)
                self.rows.row([(busy, 1.0), (chosen, -1.0)], -np.inf, 0.0)
                self._use(site, int(slot), busy, job.devices)
                work[site, int(slot)] = worked
                hours.append(worked)
            self.rows.row([*((one, 1.0) for one in hours), (chosen, -job.hours)], 0.0, 0.0)
            per_site.append(chosen)
        self._one_of(job, per_site)
        return {"work": work}

    def _add_elastic(self, job: Job, slots: Slots) -> dict[str, Any]:
        """A site, and the share of each slot with a further worker; gains that fall let shares fill in order."""
        gains = np.diff(np.concatenate([[0.0], job.speedups]))
        shares, per_site = {}, []
        for site in self.grid.sites(job):
            chosen, terms = self.rows.variable(0.0, 1, True), []
            for slot in np.flatnonzero(np.isfinite(slots.cost[site])):
                for k, gain in enumerate(gains):
                    share = self.rows.variable(float(slots.cost[site, slot]) * slots.step_h, 1, False)
                    self._use(site, int(slot), share, job.devices)
                    terms.append((share, float(gain) * slots.step_h))
                    shares[site, int(slot), k] = share
            self.rows.row([*terms, (chosen, -job.hours)], 0.0, 0.0)
            per_site.append(chosen)
        self._one_of(job, per_site)
        return {"shares": shares}

    def _add_moving(self, job: Job, slots: Slots) -> dict[str, Any]:
        """Where the job is, whether it runs there, its hours of work, its resumptions and its moves.

        `at` is the last site where it ran (before its first run: where it will run first, which costs nothing).
        """
        sites = self.grid.sites(job)
        first, last = self.grid.span(job)
        span = range(first, min(last, self.grid.num_slots))
        rows, step = self.rows, slots.step_h
        work, lost, moved = {}, {}, {}
        at_before: dict[int, int] = {}
        run_before: dict[int, int] = {}
        through_before: dict[int, int] = {}
        begun_before: int | None = None
        for slot in span:
            at = {site: rows.variable(0.0, 1, True) for site in sites}
            rows.row([(one, 1.0) for one in at.values()], 1.0, 1.0)
            run, through, begun = {}, {}, rows.variable(0.0, 1, True)
            if begun_before is not None:
                rows.row([(begun, 1.0), (begun_before, -1.0)], 0.0, np.inf)
            for site in sites:
                cost = float(slots.cost[site, slot])
                run[site] = rows.variable(0.0, 1, True)
                work[site, slot] = rows.variable(cost, step, False)
                resumed = rows.variable(slots.restart_h * cost, 1, True)
                rows.row([(run[site], 1.0), (at[site], -1.0)], -np.inf, 0.0)
                rows.row([(run[site], 1.0), (begun, -1.0)], -np.inf, 0.0)
                terms = [(work[site, slot], 1.0), (run[site], -step), (resumed, slots.restart_h)]
                moves = []
                if at_before and slots.move_cost is not None:
                    for source in sites:
                        if source == site:
                            continue
                        extra = float(slots.move_cost[source, site, slot]) + slots.move_h * cost
                        move = moved[source, site, slot] = rows.variable(extra, 1, True)
                        rows.row(
                            [(move, 1.0), (at_before[source], -1.0), (at[site], -1.0), (begun_before, -1.0)],
                            -2.0,
                            np.inf,
                        )  # type: ignore[list-item]
                        # A move is made to run at once, so that its loss falls into this slot.
                        rows.row([(move, 1.0), (run[site], -1.0)], -np.inf, 0.0)
                        terms.append((move, slots.move_h))
                        moves.append((move, -1.0))
                rows.row(terms, -np.inf, 0.0)
                # It goes on into the next slot if it runs to the end: in full, or from some time on if it did not run before.
                goes_on = through[site] = rows.variable(0.0, 1, True)
                rows.row([(goes_on, 1.0), (run[site], -1.0)], -np.inf, 0.0)
                if begun_before is not None:  # run now, not on from before, begun earlier and not moved here: resumed
                    rows.row([(resumed, 1.0), (run[site], -1.0), (through_before[site], 1.0), (begun_before, -1.0), *((m, 1.0) for m, _ in moves)], -1.0, np.inf)  # fmt: skip
                    used = [(work[site, slot], 1.0), (resumed, slots.restart_h), *((m, slots.move_h) for m, _ in moves)]
                    rows.row([*used, (goes_on, -step), (run_before[site], -step)], -step, np.inf)
                else:
                    rows.row([(resumed, 1.0)], 0.0, 0.0)
                lost[site, slot] = resumed
                self._use(site, slot, run[site], job.devices)
            if begun_before is not None:  # begun only by running
                rows.row([(begun, 1.0), (begun_before, -1.0), *((one, -1.0) for one in run.values())], -np.inf, 0.0)
                if slots.move_cost is None:
                    for site in sites:
                        rows.row([(at[site], 1.0), (at_before[site], -1.0)], 0.0, 0.0)
            else:
                rows.row([(begun, 1.0), *((one, -1.0) for one in run.values())], -np.inf, 0.0)
            at_before, run_before, through_before, begun_before = at, run, through, begun
        rows.row([(one, 1.0) for one in work.values()], job.hours, job.hours)
        return {"work": work, "lost": lost, "moved": moved, "restart_h": slots.restart_h, "move_h": slots.move_h}

    def _pieces(self, part: dict[str, Any], values: np.ndarray) -> list[Piece]:
        if "starts" in part:
            site, first = max(part["starts"], key=lambda key: values[part["starts"][key]])
            return [Piece(first + k, site, hours) for k, hours in enumerate(part["parts"])]
        found = []
        if "shares" in part:
            for site, slot in sorted({key[:2] for key in part["shares"]}, key=lambda key: key[1]):
                levels = [values[part["shares"][key]] for key in sorted(part["shares"]) if key[:2] == (site, slot)]
                levels = [*np.minimum.accumulate(levels), 0.0]
                for k in range(len(levels) - 2, -1, -1):
                    if (share := levels[k] - levels[k + 1]) > 1e-6:
                        found.append(Piece(slot, site, float(share) * self.grid.step_h, 0.0, k + 1))
            return found
        for (site, slot), variable in sorted(part["work"].items(), key=lambda item: item[0][1]):
            if values[variable] > 1e-6:
                lost, source = 0.0, None
                if "lost" in part and values[part["lost"][site, slot]] > 0.5:
                    lost = part["restart_h"]
                for (left, into, when), move in part.get("moved", {}).items():
                    if into == site and when == slot and values[move] > 0.5:
                        lost, source = part["move_h"], left
                found.append(Piece(slot, site, float(values[variable]), lost, 1, source))
        return found
