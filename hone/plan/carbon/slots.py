"""The cheapest slots for one job, exactly: by sorting, by a sliding window, or by dynamic programming where restarts and moves cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CELLS = 20_000_000
"""Most states of the dynamic program; longer work is counted in coarser units then."""
_UNITS_A_SLOT = 12
"""Parts of a slot in which work is counted where a restart takes a part of one."""
_EPS = 1e-9


class Piece(NamedTuple):
    """Work in one slot. `hours` of work, `lost` hours of restart before them, `workers` of an elastic job."""

    slot: int
    site: int
    hours: float
    lost: float = 0.0
    workers: int = 1
    moved_from: int | None = None


@dataclass(frozen=True)
class Slots:
    """What one job may use: `cost` [sites, slots] of an hour of its work, in any unit; inf where it may not run.

    A resumption at the same site loses `restart_h`, a move from `a` to `b` in slot `t` loses `move_h` and costs
    `move_cost[a, b, t]`; without `move_cost` the job stays at one site.
    """

    cost: np.ndarray
    step_h: float
    restart_h: float = 0.0
    move_h: float = 0.0
    move_cost: np.ndarray | None = None


def whole(slots: Slots, hours: float) -> list[Piece] | None:
    """The cheapest run in one piece, at one site, from the start of a slot; None where none fits."""
    full, rest = divmod(hours / slots.step_h + _EPS, 1.0)
    full, rest = int(full), (rest - _EPS if rest > 2 * _EPS else 0.0)
    num_sites, num_slots = slots.cost.shape
    length = full + (rest > 0)
    if length > num_slots:
        return None
    finite = np.isfinite(slots.cost)
    cost = np.where(finite, slots.cost, 0.0)
    sums = np.concatenate([np.zeros((num_sites, 1)), np.cumsum(cost, axis=1)], axis=1)
    free = np.concatenate([np.zeros((num_sites, 1), int), np.cumsum(finite, axis=1)], axis=1)
    starts = np.arange(num_slots - length + 1)
    total = sums[:, starts + full] - sums[:, starts]
    if rest:
        total = total + rest * cost[:, starts + full]
    total[free[:, starts + length] - free[:, starts] < length] = np.inf
    site, start = np.unravel_index(int(np.argmin(total)), total.shape)
    if not np.isfinite(total[site, start]):
        return None
    parts = [slots.step_h] * full + ([rest * slots.step_h] if rest else [])
    return [Piece(int(start) + k, int(site), part) for k, part in enumerate(parts)]


def interruptible(slots: Slots, hours: float) -> list[Piece] | None:
    """The cheapest slots of a job that may stop and resume; None where too few are left.

    Without losses these are the cheapest slots, by sorting; with them a dynamic program over (slot, site, whether it ran,
    work left) is exact up to its unit of work, a twelfth of a slot or what `CELLS` allows.
    """
    if slots.move_cost is None:
        choices = [_stay(slots, site, hours) for site in range(len(slots.cost))]
        found = [one for one in choices if one is not None]
        return min(found, key=lambda one: price(slots, one), default=None)
    if slots.restart_h == 0 and slots.move_h == 0 and not slots.move_cost.any():
        sites = np.argmin(slots.cost, axis=0)
        return _cheapest(slots.cost[sites, np.arange(len(sites))], sites, slots.step_h, hours)
    return _Program(slots, hours).solve()


def _stay(slots: Slots, site: int, hours: float) -> list[Piece] | None:
    cost = slots.cost[site]
    if slots.restart_h == 0:
        return _cheapest(cost, np.full(len(cost), site), slots.step_h, hours)
    alone = Slots(cost[None], slots.step_h, slots.restart_h, slots.restart_h, np.zeros((1, 1, len(cost))))
    found = _Program(alone, hours).solve()
    return None if found is None else [one._replace(site=site) for one in found]


def _cheapest(cost: np.ndarray, sites: np.ndarray, step_h: float, hours: float) -> list[Piece] | None:
    """The cheapest slots whose hours add up; the dearest of them is the one that is used in part."""
    count = int(np.ceil(hours / step_h - _EPS))
    order = np.argsort(cost, kind="stable")[:count]
    if len(order) < count or not np.isfinite(cost[order]).all():
        return None
    parts = {int(slot): step_h for slot in order}
    parts[int(order[-1])] = hours - step_h * (count - 1)
    return [Piece(slot, int(sites[slot]), parts[slot]) for slot in sorted(parts)]


def price(slots: Slots, pieces: list[Piece]) -> float:
    """What `pieces` cost, in the unit of `slots.cost`."""
    moves = sum(
        float(slots.move_cost[one.moved_from, one.site, one.slot])
        for one in pieces
        if one.moved_from is not None and slots.move_cost is not None
    )
    return moves + sum(float(slots.cost[one.site, one.slot]) * (one.hours + one.lost) for one in pieces)


class _Program:
    """Dynamic program, from the last slot back: `left[t][state][w]` is the least cost of `w` units from slot t on.

    State 0: not begun; 1 + s: idle, last at site s; 1 + S + s: ran at site s up to the end of the slot before. A slot that is
    used in part ends a run that came into it, and otherwise begins one at its own end.
    """

    def __init__(self, slots: Slots, hours: float) -> None:
        self.slots = slots
        self.num_sites, self.num_slots = slots.cost.shape
        states = 1 + 2 * self.num_sites
        parts = _UNITS_A_SLOT
        while parts > 1 and self.num_slots * states * hours / slots.step_h * parts > CELLS:
            parts //= 2
        self.parts, self.unit = parts, slots.step_h / parts
        self.units = int(np.ceil(hours / self.unit - _EPS))
        self.hours = hours
        self.losses = (0.0, slots.restart_h, slots.move_h, 0.0)
        self.most = [int((slots.step_h - lost) / self.unit + _EPS) for lost in self.losses[:3]]
        self.idle = np.array([0, *range(1, 1 + self.num_sites), *range(1, 1 + self.num_sites)])
        pairs = [[self._loss(state, site) for site in range(self.num_sites)] for state in range(states)]
        self.which = np.array([[one for one, _ in row] for row in pairs])
        self.source = np.array([[-1 if left is None else left for _, left in row] for row in pairs])

    def solve(self) -> list[Piece] | None:
        """The pieces of the cheapest way; None where there is none."""
        states = 1 + 2 * self.num_sites
        self.left = np.full((self.num_slots + 1, states, self.units + 1), np.inf)
        self.left[:, :, 0] = 0.0
        for slot in range(self.num_slots - 1, -1, -1):
            self._fill(slot)
        return self._walk() if np.isfinite(self.left[0, 0, self.units]) else None

    def _loss(self, state: int, site: int) -> tuple[int, int | None]:
        """Which of `losses` comes before work at `site` from `state`, and the site left, if it is another."""
        if state == 0:
            return 0, None
        if state == 1 + self.num_sites + site:
            return 3, None
        last = (state - 1) % self.num_sites
        return (1, None) if last == site else (2, last)

    def _fill(self, slot: int) -> None:
        ahead, cost = self.left[slot + 1], self.slots.cost[:, slot]
        sites = np.flatnonzero(np.isfinite(cost))
        idle = ahead[self.idle]
        if len(sites):
            price = cost[sites, None] * self.unit * np.arange(self.units + 1)
            ran = 1 + self.num_sites + sites
            # Least cost after working up to `most` units: the least of a window of values to the left.
            best = np.stack([_least_before(ahead[ran] - price, most) for most in self.most]) + price
            stop = _least_before(ahead[1 + sites] - price, self.most[0]) + price
            full = np.full(stop.shape, np.inf)
            full[:, self.most[0] :] = (ahead[ran] - price)[:, : -self.most[0]] + price[:, self.most[0] :]
            best = np.concatenate([best, np.minimum(stop, full)[None]])
            which, source = self.which[:, sites], self.source[:, sites]
            fixed = np.array(self.losses)[which] * cost[sites]
            moved = np.where(source >= 0, self.slots.move_cost[source, sites, slot], 0.0)  # type: ignore[index]
            ways = best[which, np.arange(len(sites))] + (fixed + moved)[..., None]
            idle = np.minimum(idle, ways.min(axis=1))
        idle[:, 0] = 0.0
        self.left[slot] = idle

    def _walk(self) -> list[Piece]:
        pieces: list[Piece] = []
        state, left, worked = 0, self.units, 0.0
        for slot in range(self.num_slots):
            if left == 0:
                break
            value, ahead = self.left[slot, state, left], self.left[slot + 1]
            idle = int(self.idle[state])
            if ahead[idle, left] <= value + _EPS * max(1.0, abs(value)):
                state = idle
                continue
            site, taken = self._choice(slot, state, left)
            which, moved_from = self._loss(state, site)
            lost = self.losses[which]
            # A rest that is no whole unit is taken from the last piece.
            hours = min(taken * self.unit, self.hours - worked)
            pieces.append(Piece(slot, site, hours, lost, 1, moved_from))
            worked += hours
            stops = which == 3 and taken < self.most[0]
            left, state = left - taken, 1 + site if stops else 1 + self.num_sites + site
        return pieces

    def _choice(self, slot: int, state: int, left: int) -> tuple[int, int]:
        """The site and the units that attain the value of a state."""
        found = (np.inf, 0, 0)
        for site in np.flatnonzero(np.isfinite(self.slots.cost[:, slot])):
            cost, (which, source) = float(self.slots.cost[site, slot]), self._loss(state, int(site))
            fixed = self.losses[which] * cost
            if source is not None:
                fixed += float(self.slots.move_cost[source, site, slot])  # type: ignore[index]
            most = self.most[which % 3]
            taken = np.arange(1, min(most, left) + 1)
            if len(taken):
                after = np.where((which != 3) | (taken == most), 1 + self.num_sites + site, 1 + site)
                costs = fixed + cost * self.unit * taken + self.left[slot + 1, after, left - taken]
                found = min(found, (float(costs.min()), int(site), int(taken[costs.argmin()])))
        return found[1], found[2]


def _least_before(values: np.ndarray, most: int) -> np.ndarray:
    """The least of the `most` values left of each one, [rows, n]; inf where there is none."""
    out = np.full(values.shape, np.inf)
    if most < 1:
        return out
    out[:, 1:] = values[:, :-1]
    width = 1
    while width < most:  # the least of twice as many is that of two neighbouring windows, which may overlap
        step = min(width, most - width)
        wider = out.copy()
        np.minimum(out[:, step:], out[:, :-step], out=wider[:, step:])
        out, width = wider, width + step
    return out


def elastic(
    slots: Slots, hours: float, speedups: tuple[float, ...], limit: np.ndarray | None = None
) -> list[Piece] | None:
    """Slots and workers of a job that may change its size: greedily by work per cost (CarbonScaler, Hanafy et al. 2023, arXiv:2302.08681).

    Each further worker of a slot adds `speedups[k] - speedups[k-1]` hours of work and costs an hour like the first; as gains
    fall with workers, taking the cheapest work first is optimal at one site. `limit` [sites, slots] is the most workers.
    `Piece.hours` are hours of the slot, so that work is hours * speedups[workers - 1]; the last slot may be used in part.
    """
    gains = np.diff(np.concatenate([[0.0], speedups]))
    plans = []
    for site in range(len(slots.cost)):
        cost = slots.cost[site]
        most = np.full(len(cost), len(gains)) if limit is None else np.minimum(limit[site], len(gains))
        each = [
            (float(cost[slot] / gain), slot, k)
            for slot in range(len(cost))
            if np.isfinite(cost[slot])
            for k, gain in enumerate(gains[: int(most[slot])])
        ]
        left, workers, part = hours, {}, {}
        for _, slot, k in sorted(each):
            if left <= _EPS:
                break
            share = min(1.0, left / (gains[k] * slots.step_h))
            left -= share * gains[k] * slots.step_h
            workers[slot] = k + 1
            if share < 1.0 - _EPS:
                part[slot] = (k, share)
        if left > _EPS:
            continue
        pieces = []
        for slot in sorted(workers):
            k, share = part.get(slot, (workers[slot] - 1, 1.0))
            pieces.append(Piece(slot, site, slots.step_h * share, 0.0, k + 1))
            if share < 1.0 and k:  # the other workers go on to the end of the slot
                pieces.append(Piece(slot, site, slots.step_h * (1 - share), 0.0, k))
        plans.append(pieces)
    return min(plans, key=lambda one: sum(slots.cost[p.site, p.slot] * p.hours * p.workers for p in one), default=None)
