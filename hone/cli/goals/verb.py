"""`hone plan GOAL`: searches, prints the front, and keeps it as an artifact with `--out`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hone.cli.options import circumstances, fields, need

OF_GOAL = ("out", "device", "json", "execute", "redo", "quiet")

USAGE = """usage: hone plan GOAL.yaml [--FIELD=VALUE ...] [--out=FOLDER] [--execute=N] [--json] [--device=cuda] [--redo]

Searches all configurations of a goal: a YAML file with a key `goal` (train, serve, compress+serve, train+compress+serve), a
model, machines and limits. Prints the front of time, money, energy, CO2 and quality with error bars, the chosen row and what
was rejected why; with --out it is kept, with the recipe of each row. --execute=N runs the N best for some steps on this machine and
corrects the predictions by what they took. Where nothing keeps all limits it says which of them bind and what each would have to be;
the exit code is then 2.
"""


def search(words: list[str], options: dict[str, str]) -> int:
    """Runs the search of a goal; returns 2 where nothing keeps its limits."""
    from hone.base.artifact import Draft
    from hone.cli.goals.show import show
    from hone.measure.machine import machine_of
    from hone.plan.search import record
    from hone.plan.search.goal import HERE, Goal
    from hone.plan.search.searching import search as search_for

    count = _count(options["execute"]) if "execute" in options else 0
    goal = Goal.load(need(words, "GOAL"))
    changes = fields(options, *OF_GOAL)
    goal = goal.override(changes) if changes else goal
    run = circumstances({name: value for name, value in options.items() if name in ("device", "redo", "quiet")})
    if HERE in goal.machines:
        run = _calibrated(run)
    opened = record.opened(Path(options["out"]), goal, run) if "out" in options else None
    if opened is not None and not isinstance(opened, Draft):
        print(f"{opened.folder} has the plan of this goal; --redo searches again")
        return 0
    found = search_for(goal, device=run.device, machine=machine_of(run), say=run.say)
    if count:
        from hone.plan.search.executing.refit import executed

        found = executed(found, count, run)
    if isinstance(opened, Draft):
        with opened as draft:
            record.written(found, draft)
    if "json" in options:
        import json

        print(json.dumps(record.front_of(found), indent=1, ensure_ascii=False, default=str))
    else:
        show(found, options.get("out"))
    return 0 if found.ways else 2


def _calibrated(run: Any) -> Any:
    from hone.cli.options import calibrated

    return calibrated(run)


def _count(text: str) -> int:
    """The number of ways of --execute=N. Raises SpecError for another text, before a search takes its minutes."""
    from hone.base.errors import SpecError

    if not text.isdigit() or int(text) < 1:
        raise SpecError(f"--execute={text} is no number of ways", fix="write --execute=3")
    return int(text)
