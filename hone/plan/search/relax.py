"""What a goal that nothing reaches would have to be: each binding limit, the cheapest ways around it, and whether a search confirms them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hone.plan.search.goal import HERE, Goal, parts_of
from hone.plan.search.limits import Broken, Limit, Tally
from hone.plan.search.ways import Way

ROOM = 1.02
"""A relaxed limit is that of the nearest configuration and so much more, so that another search finds it."""

FACTORS = (2, 4, 8, 16)
"""Times the devices that are tried."""

FIELDS = {"deadline": "deadline_h", "budget": "budget", "energy": "energy_kwh"}
REQUESTS = {"ttft": "ttft_s", "tpot": "tpot_s", "throughput": "tokens_per_s"}
QUALITY = {"loss": "loss", "loss of compression": "max_increase"}


class Relaxed(NamedTuple):
    """A way around limits that nothing keeps: `said`, the changed fields of the goal, and the best way that a search of it found."""

    names: tuple[str, ...]
    said: str
    changes: dict[str, Any]
    way: Way | None
    """None: the search of the changed goal found nothing either."""


def relaxations(goal: Goal, tally: Tally, again: Callable[[Goal], list[Way]]) -> tuple[Relaxed, ...]:
    """For each set of limits that binds, its own relaxation, then more devices; each verified by `again`, the search of another goal."""
    found = []
    for broken in tally.binding():
        changes, said = _own(goal, tally, broken)
        if changes:
            found.append(_verified(broken.names, said, changes, goal, again))
    for names in ([one.names for one in tally.binding()] or [("memory",)])[:1]:
        more = _more_devices(goal, names, again)
        found += [more] if more is not None else []
    return tuple(found)


def _own(goal: Goal, tally: Tally, broken: Broken) -> tuple[dict[str, Any], str]:
    """The changes of `goal` by which the limits of `broken` would hold, and what they say."""
    changes: dict[str, Any] = {}
    said = []
    for name, value in zip(broken.names, broken.values, strict=True):
        limit: Limit = tally.limit(name)
        if name == "memory":
            way: Way = broken.row
            said.append(
                f"memory: needs {value * way.fleet.memory_bytes / 1e9:.1f} GB a device, has {way.fleet.memory_bytes / 1e9:.1f}"
            )
            continue
        relaxed = value / ROOM if limit.least else value * ROOM
        said.append(f"{name} {limit.said(limit.bound)} -> {limit.said(relaxed)}")
        if name in FIELDS:
            changes[FIELDS[name]] = relaxed
        elif name in REQUESTS:
            changes["requests"] = {**changes.get("requests", goal.requests.model_dump()), REQUESTS[name]: relaxed}
        elif name in QUALITY:
            changes["quality"] = {**changes.get("quality", goal.quality.model_dump()), QUALITY[name]: relaxed}
    if "memory" in broken.names:
        changes = {}
    return changes, ", ".join(said)


def _more_devices(goal: Goal, names: tuple[str, ...], again: Callable[[Goal], list[Way]]) -> Relaxed | None:
    """The fewest devices, by doubling, with which a search finds something; None where only this machine is allowed."""
    elsewhere = [one for one in goal.machines if one != HERE]
    if not elsewhere:
        return None
    for factor in FACTORS:
        machines = tuple(f"{parts_of(one)[0] * factor}x{parts_of(one)[1]}" for one in elsewhere)
        found = _verified(
            names, f"{factor} times the devices: {', '.join(machines)}", {"machines": machines}, goal, again
        )
        if found.way is not None:
            return found
    return Relaxed(names, f"not even {FACTORS[-1]} times the devices help", {}, None)


def _verified(
    names: tuple[str, ...], said: str, changes: dict[str, Any], goal: Goal, again: Callable[[Goal], list[Way]]
) -> Relaxed:
    """The relaxation with the fastest way that a search of the changed goal finds."""
    ways = again(Goal.read({**goal.model_dump(mode="json"), **changes}))
    best = min(ways, key=lambda way: way.all_hours or float("inf"), default=None)
    return Relaxed(names, said, changes, best)
