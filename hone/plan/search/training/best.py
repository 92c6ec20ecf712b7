"""The best trainings of a model on a machine: all configurations priced in blocks, the fastest that keep the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from hone.plan.search.limits import Tally
from hone.plan.search.product import Columns
from hone.plan.search.quality import trained_loss
from hone.plan.search.training.bounds import Priced, priced
from hone.plan.search.training.rates import Rates
from hone.plan.search.training.space import Trainings
from hone.plan.search.ways import Way

MOST = 24
"""Fastest configurations that stay of each batch size and number of tokens."""

SLACK = 0.8
"""Of the closed form's bytes of a pipeline, what is compared with the memory: it is up to a quarter above the plan's, which decides later."""


def best(of: Trainings, tally: Tally) -> list[Way]:
    """The fastest `MOST` ways for every batch size and number of tokens that keep the limits of `tally`, which counts all others."""
    rates, found = Rates(of), dict[tuple[int, int], list[tuple[float, dict[str, Any]]]]()
    tally.asked += of.product.size
    for block in of.blocks(tally.rejected):
        rows = priced(rates, block)
        good = tally.keep(amounts(of, block, rows), lambda index, block=block, rows=rows: _way(of, block, rows, index))
        for key, index in _fastest(block, rows, good):
            found.setdefault(key, []).append((float(rows.hours[index]), _way(of, block, rows, index)))
    ways = []
    for each in found.values():
        ways += [way for _, way in sorted(each, key=lambda one: one[0])[:MOST]]
    return ways


def amounts(of: Trainings, block: Columns, rows: Priced) -> dict[str, Any]:
    """What the limits of a goal are compared with, by their names; NaN where unknown."""
    fleet = of.fleet
    nothing = np.full(len(rows.hours), np.nan)
    pipeline = of.product.column(block, "stages") > 1
    tokens = of.product.column(block, "tokens")
    loss = {value: trained_loss(of.candidate.dims.active_params, value).value for value in of.product.axes["tokens"]}
    dollars, joules = fleet.dollars(rows.hours), fleet.joules(rows.hours)
    return {
        "memory": rows.num_bytes * np.where(pipeline, SLACK, 1.0) / fleet.memory_bytes,
        "deadline": rows.hours,
        "budget": nothing if dollars is None else dollars,
        "energy": nothing if joules is None else joules / 3.6e6,
        "loss": np.array([loss[value] for value in of.product.axes["tokens"]])[block["tokens"]]
        if len(tokens)
        else nothing,
    }


def _fastest(block: Columns, rows: Priced, good: Any) -> Iterator[tuple[tuple[int, int], int]]:
    """(batch size and tokens, row) of the fastest rows of each such group."""
    groups = block["batch_size"] * 4096 + block["tokens"]
    for group in np.unique(groups[good]):
        places = np.flatnonzero(good & (groups == group))
        few = places[np.argsort(rows.hours[places], kind="stable")[:MOST]]
        yield from ((divmod(int(group), 4096), int(place)) for place in few)


def _way(of: Trainings, block: Columns, rows: Priced, index: int) -> Way:
    """The row of a block as a way."""
    at = of.product.at(block, index) | {"passes": int(block["passes"][index])}
    return Way(
        of.candidate,
        of.fleet,
        train=at,
        step_s=float(rows.step_s[index]),
        train_hours=float(rows.hours[index]),
        train_bytes=float(rows.num_bytes[index]),
        quality=trained_loss(of.candidate.dims.active_params, at["tokens"]),
    )


def counted(rejected: Counter[str]) -> dict[str, int]:
    """Reasons with their counts, most first, without those that never applied."""
    return {reason: count for reason, count in rejected.most_common() if count}
