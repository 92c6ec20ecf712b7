"""Cheaper clocks for the passes of a pipeline that have time to spare: which of its settings each pass takes, at no longer a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hone.base.errors import SpecError
from hone.cost.pipeline.table import Kind, Op, Table

LARGEST = 64
"""Passes up to which `exact` is meant to be used."""
_EPS = 1e-9


class Choice(NamedTuple):
    """Seconds and joules of a pass under one setting, such as a clock."""

    time_s: float
    energy_j: float
    setting: float = 0.0


@dataclass(frozen=True)
class Stretched:
    """A setting for every pass: `taken[i]` of the pass of `Table.turns[i]`, the seconds of the step, and joules with those of waiting."""

    taken: tuple[Choice, ...]
    seconds: float
    energy_j: float


Choices = Mapping[tuple[Kind, int], Sequence[Choice]]
"""By kind and stage of a pass its settings."""


def fastest(table: Table, choices: Choices, waiting_w: float = 0.0, transfer_s: float = 0.0) -> Stretched:
    """Every pass at its fastest setting, of equal ones the cheapest."""
    return _done(table, [_sorted(choices, turn.op)[0] for turn in table.turns], waiting_w, transfer_s)


def stretch(
    table: Table, choices: Choices, *, slower: float = 0.0, waiting_w: float = 0.0, transfer_s: float = 0.0
) -> Stretched:
    """Slows passes that are not on the critical path, those first that save most joules a second, until no slack is left.

    EnvPipe, Choi et al. 2023 (USENIX ATC). The step takes at most 1 + `slower` times that of all passes at their fastest. A rank that
    waits draws `waiting_w`, so what a pass saves is its joules less those of the waiting that it replaces (Perseus, arXiv:2312.06902).
    Raises SpecError for a pass without settings.
    """
    turns = table.turns
    ladders = [_ladder(_sorted(choices, turn.op), waiting_w) for turn in turns]
    at = [0] * len(turns)
    times = np.array([ladder[0].time_s for ladder in ladders])
    deadline = _ends(table, times, transfer_s).max() * (1 + slower)
    while True:
        spare = _spare(table, times, transfer_s, deadline)
        best, gain = -1, _EPS
        for number, ladder in enumerate(ladders):
            if at[number] + 1 < len(ladder):
                now, next_ = ladder[at[number]], ladder[at[number] + 1]
                longer = next_.time_s - now.time_s
                saved = _net(now, waiting_w) - _net(next_, waiting_w)
                if longer <= spare[number] + _EPS and saved / max(longer, _EPS) > gain:
                    best, gain = number, saved / max(longer, _EPS)
        if best < 0:
            return _done(
                table, [ladder[place] for ladder, place in zip(ladders, at, strict=True)], waiting_w, transfer_s
            )
        at[best] += 1
        times[best] = ladders[best][at[best]].time_s


def exact(
    table: Table, choices: Choices, *, slower: float = 0.0, waiting_w: float = 0.0, transfer_s: float = 0.0
) -> Stretched:
    """As `stretch`, but of least energy: a mixed-integer program with a binary a setting and a begin a pass, for few passes."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    turns = table.turns
    options = [_sorted(choices, turn.op) for turn in turns]
    deadline = fastest(table, choices, waiting_w, transfer_s).seconds * (1 + slower)
    starts = np.cumsum([0, *map(len, options)])
    size = int(starts[-1]) + len(turns) + 1
    cost = np.zeros(size)
    last = size - 1  # when the step ends: until then all ranks draw what waiting does
    cost[last] = waiting_w * len(table.ranks)
    rows: list[tuple[dict[int, float], float, float]] = []
    for number, (turn, own) in enumerate(zip(turns, options, strict=True)):
        here = {int(starts[number]) + place: one.time_s for place, one in enumerate(own)}
        for place, one in enumerate(own):
            cost[starts[number] + place] = _net(one, waiting_w)
        rows.append((dict.fromkeys(here, 1.0), 1.0, 1.0))
        begin = int(starts[-1]) + number
        rows.append(({begin: 1.0, **here, last: -1.0}, -np.inf, 0.0))
        for before, gap in [(turn.before, 0.0)] * (turn.before >= 0) + [(one, transfer_s) for one in turn.sent]:
            ends = {int(starts[before]) + place: -one.time_s for place, one in enumerate(options[before])}
            rows.append(({begin: 1.0, int(starts[-1]) + before: -1.0, **ends}, gap, np.inf))
    matrix = lil_matrix((len(rows), size))
    for row, (entries, _, _) in enumerate(rows):
        for column, value in entries.items():
            matrix[row, column] = value
    limits = LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows])
    whole = np.arange(size) < starts[-1]
    upper = np.where(whole, 1.0, np.inf)
    upper[last] = deadline + _EPS
    found = milp(
        cost, constraints=limits, integrality=whole.astype(int), bounds=Bounds(0, upper), options={"mip_rel_gap": 0.0}
    )
    assert found.success, f"every pass at its fastest keeps the deadline: {found.message}"
    taken = [
        own[int(np.argmax(found.x[starts[number] : starts[number] + len(own)]))] for number, own in enumerate(options)
    ]
    return _done(table, taken, waiting_w, transfer_s)


def _sorted(choices: Choices, op: Op) -> list[Choice]:
    found = sorted(choices.get((op.kind, op.stage), ()))
    if not found:
        raise SpecError(
            f"no settings are given for {op}", fix="give the seconds and joules of each kind of pass of each stage"
        )
    return found


def _net(choice: Choice, waiting_w: float) -> float:
    """Joules beyond those that the rank would draw in the same time if it waited."""
    return choice.energy_j - waiting_w * choice.time_s


def _ladder(options: Sequence[Choice], waiting_w: float) -> list[Choice]:
    """From the fastest on the settings on the lower convex hull of net joules over seconds: each step saves less a second than the one before."""
    hull: list[Choice] = []
    for one in options:
        if hull and _net(one, waiting_w) >= _net(hull[-1], waiting_w):
            continue
        while len(hull) > 1 and _rate(hull[-2], hull[-1], waiting_w) <= _rate(hull[-2], one, waiting_w):
            hull.pop()
        hull.append(one)
    return hull


def _rate(fast: Choice, slow: Choice, waiting_w: float) -> float:
    return (_net(fast, waiting_w) - _net(slow, waiting_w)) / max(slow.time_s - fast.time_s, _EPS)


def _ends(table: Table, times: np.ndarray, transfer_s: float) -> np.ndarray:
    """When each pass ends, at the earliest."""
    ends = np.zeros(len(times))
    for number, turn in enumerate(table.turns):
        begin = max([ends[turn.before] if turn.before >= 0 else 0.0, *(ends[one] + transfer_s for one in turn.sent)])
        ends[number] = begin + times[number]
    return ends


def _spare(table: Table, times: np.ndarray, transfer_s: float, deadline: float) -> np.ndarray:
    """By how much each pass may take longer with no step later than `deadline`."""
    latest = np.full(len(times), deadline)
    for number in range(len(times) - 1, -1, -1):
        turn, begin = table.turns[number], latest[number] - times[number]
        if turn.before >= 0:
            latest[turn.before] = min(latest[turn.before], begin)
        for one in turn.sent:
            latest[one] = min(latest[one], begin - transfer_s)
    return latest - _ends(table, times, transfer_s)


def _done(table: Table, taken: Sequence[Choice], waiting_w: float, transfer_s: float) -> Stretched:
    times = np.array([one.time_s for one in taken])
    seconds = float(_ends(table, times, transfer_s).max())
    waiting_s = seconds * len(table.ranks) - float(times.sum())
    energy = sum(one.energy_j for one in taken) + waiting_w * waiting_s
    return Stretched(tuple(taken), seconds, energy)
