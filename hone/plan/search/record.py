"""A plan as an artifact: the goal, the front with the recipe of each row, what was rejected and why, and hone.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from hone.base.artifact import Artifact, Draft, start
from hone.base.durable import write_atomic
from hone.base.run import Run
from hone.plan.search.goal import AXES, Goal
from hone.plan.search.machines import Fleet, catalogue_date
from hone.plan.search.recipes import yaml_of
from hone.plan.search.searching import Found
from hone.plan.search.ways import Way

RECIPES = "recipes"
UNITS = {"hours": "h", "dollars": "$", "joules": "J", "grams": "g", "loss": "nats/token"}


def opened(out: Path | str, goal: Goal, run: Run) -> Artifact | Draft:
    """The finished plan in `out`, or the draft of one. Raises DriftError where another goal's plan is there."""
    return start(out, kind="plan", spec=goal, run=run)


def written(found: Found, draft: Draft) -> Artifact:
    """Writes `found` into `draft`: goal.yaml, front.json, rejected.json, recipes/N.yaml; returns the artifact."""
    goal, line = found.goal, draft.target.name
    (draft.folder / RECIPES).mkdir(exist_ok=True)
    for number, way in enumerate(found.ways, 1):
        path = draft.folder / recipe_name(number)
        write_atomic(path, yaml_of(way.recipe(goal, f"{line}-{number}"), goal).encode())
    write_atomic(draft.folder / "goal.yaml", goal.to_yaml().encode())
    write_atomic(draft.folder / "front.json", _json(front_of(found)))
    write_atomic(draft.folder / "rejected.json", _json(dict(found.tally.rejected.most_common())))
    draft.record("configurations", float(found.tally.asked), "", how="measured", note="combinations of the axes")
    draft.record(
        "priced", float(found.tally.priced), "", how="measured", note="those whose seconds and bytes were computed"
    )
    draft.record("search_s", found.search_s, "s", how="measured")
    draft.record("simulate_s", found.simulate_s, "s", how="measured")
    if found.chosen is not None:
        for axis, value in found.chosen.axes().items():
            note = "" if value is not None else "unknown"
            half = found.chosen.half(axis)
            more = {"note": note if half is None else f"of the chosen way, {found.chosen.evidence}, +- {half:.3g}"}
            draft.record(axis, value, UNITS[axis], how="modelled", **more)
    return draft.commit()


def recipe_name(number: int) -> str:
    """The file of the recipe of row `number`, from 1 on."""
    return f"{RECIPES}/{number:02}.yaml"


def front_of(found: Found) -> dict[str, Any]:
    """All that a search found, as JSON values."""
    return {
        "goal": found.goal.model_dump(mode="json"),
        "catalogue": catalogue_date(),
        "machines": [_fleet(one) for one in found.fleets],
        "rows": [_row(number, way) for number, way in enumerate(found.ways, 1)],
        "overlapping": found.overlapping,
        "relaxed": [
            {
                "limits": one.names,
                "said": one.said,
                "changes": one.changes,
                "verified": one.way is not None,
                "way": one.way and _row(0, one.way),
            }
            for one in found.relaxed
        ],
        "rejected": dict(found.tally.rejected.most_common()),
        "configurations": found.tally.asked,
        "priced": found.tally.priced,
        "search_s": found.search_s,
        "simulate_s": found.simulate_s,
        "notes": found.notes,
    }


def _fleet(fleet: Fleet) -> dict[str, Any]:
    return {
        "name": fleet.label,
        "processor": fleet.machine.processor,
        "rates": fleet.rates,
        "calibration": calibration_id(fleet),
        "memory_bytes": fleet.memory_bytes,
        "price_per_hour": fleet.price_per_hour,
        "watts": fleet.watts,
        "grid_g_per_kwh": fleet.grid_g_per_kwh,
    }


def calibration_id(fleet: Fleet) -> str | None:
    """A digest of the rates that the seconds rest on; None for bounds."""
    if fleet.machine.calibration is None:
        return None
    return hashlib.sha256(fleet.machine.calibration.model_dump_json().encode()).hexdigest()[:12]


def _row(number: int, way: Way) -> dict[str, Any]:
    axes = way.axes()
    return {
        "recipe": recipe_name(number) if number else None,
        "machine": way.fleet.label,
        "model": way.candidate.name,
        "num_params": way.candidate.dims.num_params,
        "layout": way.label(),
        "train": way.train,
        "format": way.format and way.format.name,
        "engine": way.engine,
        "axes": {axis: {"value": axes[axis], "half": way.half(axis), "unit": UNITS[axis]} for axis in AXES},
        "quality": None if way.quality is None else way.quality._asdict(),
        "step_s": way.step_s,
        "tpot_s": way.tpot_s,
        "ttft_s": way.ttft_s,
        "tokens_per_s": way.tokens_per_s,
        "memory_bytes": way.memory_bytes,
        "evidence": way.evidence,
        "measured": way.measured,
        "why": way.why,
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n").encode()
