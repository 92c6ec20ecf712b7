"""Formats whose matrices have several bits: a few points of the front of bytes and loss, chosen exactly, or a choice within the goal's limit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hone.base.errors import SpecError
from hone.compress import ALLOCATIONS
from hone.compress.allocations.base import SENSITIVITIES, Allocation
from hone.plan.search.goal import Goal
from hone.plan.search.quality import Known
from hone.plan.search.ways import Format
from hone.solvers.knapsack import smallest

POINTS = 4
"""Of a front: at most so much loss, and three times half of the one before."""

STEP = {"kind": "gptq", "bits": 4, "group_size": 128, "uneven": "nearest"}
FAST = (4, 8)
"""Bits that every engine's kernels multiply fast."""


def mixed_formats(goal: Goal) -> tuple[Format, ...]:
    """The formats of several bits of `goal`: points of the fronts that its `measured` folders hold, else a choice within its limit.

    Without either there are none: the loss of other choices is unknown. Raises SpecError for a folder whose file cannot be read.
    """
    if not goal.compresses:
        return ()
    most = goal.quality.max_increase
    measured = [Path(folder) for folder in goal.measured if (Path(folder) / SENSITIVITIES).exists()]
    if measured or most is None:  # a front on which nothing is within the limit says that nothing is
        return tuple(one for folder in measured for one in _points(folder, most))
    return (_within(most),)


def _within(most: float) -> Format:
    """The fewest bytes that lose at most `most`, whose bytes are known when losses are measured: until then those of the most bits."""
    allocation = {"kind": "hessian", "bits": list(FAST), "max_kl": most}
    how = "at most: the compression chooses bits by what each matrix loses, and says what the model lost"
    return Format(f"int4 and int8 within {most:g} nats", (STEP,), 8.125, allocation, Known(most, 0.0, how))


def _points(folder: Path, most: float | None) -> list[Format]:
    """Points of the front that a compression in `folder` measured, each the fewest bytes of at most so much loss, the most loss first.

    Their losses add up what each matrix loses alone, times the share of it that was measured of other models, or of this one.
    """
    path = folder / SENSITIVITIES
    try:
        kept = json.loads(path.read_text(encoding="utf8"))
        made = json.loads((folder / "hone.json").read_text(encoding="utf8"))
        rows = list(kept["matrices"].values())
        allocation: Allocation = ALLOCATIONS.read(kept["allocation"])
        sizes, losses = [row["bytes"] for row in rows], [row["losses"] for row in rows]
        weights, own = sum(row["weights"] for row in rows), _own_share(made, kept["loss"])
        step = next((one for one in made["spec"]["steps"] if "bits" in one), STEP)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path} does not say what matrices lose: {error}", fix="compress the model again") from None
    share = max(allocation.most_share or 1.0, own)
    fewest = share * sum(map(max, losses))
    found: dict[int, Format] = {}
    for halvings in range(POINTS):
        bound = min(most or fewest, fewest) / 2**halvings
        picked = smallest(sizes, losses, bound / share)
        if picked is None:
            break
        size = sum(options[place] for options, place in zip(sizes, picked, strict=True))
        upper = share * sum(values[place] for values, place in zip(losses, picked, strict=True))
        bits = math.ceil(8e4 * size / weights) / 1e4
        found.setdefault(size, _format(bits, upper, allocation, step, folder))
    return list(found.values())


def _format(bits: float, upper: float, allocation: Allocation, step: dict[str, Any], folder: Path) -> Format:
    """The format of `bits` a weight, which loses at most `upper` as predicted."""
    fields = allocation.model_dump(mode="json", exclude_defaults=True) | {"kind": allocation.kind}
    fields = {name: value for name, value in fields.items() if name not in ("model_bytes", "max_kl")}
    fields |= {"bits": list(allocation.bits), "bits_per_weight": bits}
    known = Known(upper, 0.0, f"at most, by what each matrix lost alone in {folder}")
    return Format(f"mixed {bits:.2f} bits", (step,), bits, fields, known)


def _own_share(made: dict[str, Any], loss: float) -> float:
    """The divergence that the folder's own model was measured to have, over the sum of its matrices' losses; 0 where it was not."""
    kl = next((row["value"] for row in made["figures"] if row["name"] == "kl_to_dense"), None)
    return kl / loss if kl is not None and loss > 0 else 0.0
