"""Verbs over a whole recipe or line: plan, run, report."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from hone.cli.launch import OPTION
from hone.cli.machine.binding import bind_rank
from hone.cli.options import calibrated, circumstances, fields, need, only, say_doubt

OF_RUN = (
    "work",
    "device",
    "redo",
    "quiet",
    "executor",
    "workers",
    "executor.",
    OPTION,
    "numa_binding",
    "wandb.",
    "profiling.",
    "clock.",
    "power_trace",
)
OF_PLAN = ("work", "device", "redo")


def plan(words: list[str], options: dict[str, str]) -> int:
    """Prints the estimates of every stage of a recipe; returns 2 when something does not fit."""
    from hone.cli.goals.verb import USAGE, search
    from hone.cli.tables import show_plan
    from hone.plan.search.goal import is_goal
    from hone.recipe import Recipe

    if "help" in options:
        print(
            "usage: hone plan RECIPE [--STAGE.FIELD=VALUE ...] [--work=FOLDER] [--redo=STAGE|drifted|all] [--device=cuda]\n\n"
            "Prints the estimates of every missing stage: seconds, memory, disk, energy where a model of it exists; and\n"
            "what does not fit, with ways out. Makes nothing. The exit code is 2 when something does not fit.\n\n"
            + USAGE
        )
        return 0
    if is_goal(Path(need(words, "RECIPE"))):
        return search(words, options)
    recipe = Recipe.load(need(words, "RECIPE")).override(fields(options, *OF_PLAN))
    work, redo = options.get("work", "work"), _redo(options)
    run = circumstances({name: value for name, value in options.items() if name in OF_PLAN})
    run = _calibrated(recipe, run, work, redo)
    rows = recipe.plan(work, run, redo)
    if _predicts(recipe, rows):
        say_doubt(run)
    return show_plan(rows, run)


def run(words: list[str], options: dict[str, str]) -> int:
    """Plans, makes every missing stage, and writes the report."""
    from hone.base.artifact import Artifact
    from hone.base.errors import FitError
    from hone.cli.tables import compact
    from hone.recipe import Node, Recipe

    if "help" in options:
        print(
            "usage: hone run RECIPE [--STAGE.FIELD=VALUE ...] [--work=FOLDER] [--redo=STAGE|drifted|all] [--device=cuda]\n"
            "       [--executor=processes|ray|slurm] [--workers=N] [--nproc_per_node=N] [--wandb.project=NAME]\n"
            "       [--profiling.enable_profiling]\n\n"
            "Makes every missing stage of the recipe, resumes an interrupted one, then writes the report.\n"
            "A stage is addressed by its kind when only one is of that kind (--data.source=PATH), else by its folder\n"
            "name (--train-base.steps=100). hone show RECIPE prints all fields; hone plan RECIPE prints the estimates."
        )
        return 0
    recipe = Recipe.load(need(words, "RECIPE")).override(fields(options, *OF_RUN))
    redo, work = _redo(options), options.get("work", "work")
    here = circumstances(options)
    here.redo = False
    _need_shared(recipe, here.mesh.world_size)
    bind_rank(here)
    here = _calibrated(recipe, here, work, redo)
    started = time.monotonic()
    with here.progress("planning", None):  # the first time on a machine, kernels of the data stage are compiled
        planned = recipe.plan(work, here, redo)
    here.say(compact(planned))
    if _predicts(recipe, planned):
        say_doubt(here)
    for row in planned:
        if isinstance(row.problem, FitError):
            raise row.problem  # other problems are raised when the stage is reached, with its actual inputs
        if row.problem is not None:
            here.warn(f"{row.name}: {row.problem.what}")

    def watch(position: int, total: int, node: Node, artifact: Artifact, made: bool) -> None:
        took = artifact.figures.get("time_s")
        predicted = (
            f", predicted {took.estimate.value:.1f} s" if took and took.estimate and not took.estimate.bound else ""
        )
        note = "there already"
        if made and took and took.value is not None:
            note = f"{took.value:.1f} s{predicted}"
        here.say(f"[{position}/{total}] {node.folder:24} {note}")

    line = recipe.run(work, here, redo, watch)
    if not here.mesh.leads:
        return 0
    from hone.report import build

    page = build(line)
    hone, made = invoked(), {node.stage: node.folder for node in reversed(recipe.nodes())}
    commands = _with_model(line, made) if "train" in made else []
    if sum(node.stage == "data" for node in recipe.nodes()) == 1:
        commands += [f"run {words[1]} --data.source=YOUR_TEXT_FOLDER --work=work/yours"]
    took = f"done in {time.monotonic() - started:.0f} s; the report: {page}"
    print("\n".join([f"\n{took}", *["\ntry next:"] * bool(commands), *(f"  {hone} {command}" for command in commands)]))
    return 0


def _need_shared(recipe: Any, world_size: int) -> None:
    """Raises SpecError, on every rank, when there are several and no stage of `recipe` shares its work."""
    from hone.base.errors import SpecError

    nodes = recipe.nodes()
    if world_size > 1 and not any(node.read().every_rank for node in nodes):
        stages = ", ".join(node.folder for node in nodes)
        error = SpecError(
            f"{world_size} ranks, and no stage of the recipe shares its work among them: {stages}",
            fix="run it in one process; stages train and compress use several",
        )
        error.told = True
        raise error


def _with_model(line: Path, made: dict[str, str]) -> list[str]:
    """Commands for the model that was trained first; its folder may be replaced by any of Hugging Face form."""
    model = shlex.quote(str(line / made["train"]))
    text = f" --from.data={shlex.quote(str(line / made['data']))}" if "data" in made else ""
    steps = "[{kind: gptq, uneven: nearest}]" if text else "[{kind: rtn, uneven: nearest}]"  # groups that fit any width
    out = shlex.quote(str(line.parent / "mine" / "compress-int4"))
    return [f"serve {model}", f"compress {model}{text} --steps='{steps}' --out={out}"]


def _calibrated(recipe: Any, run: Any, work: str, redo: tuple[str, ...]) -> Any:
    """`run` with this machine's rates, which a recipe of data stages alone does not need (nor torch, which measures them)."""
    from hone.recipe import mistaken

    def needed() -> bool:
        rows = recipe.plan(work, run, redo)
        return _predicts(recipe, rows) and not any(map(mistaken, rows))

    return run if all(node.stage == "data" for node in recipe.nodes()) else calibrated(run, needed)


def _predicts(recipe: Any, rows: list[Any]) -> bool:
    """Whether a plan has estimates from the rates of the machine: a data stage measures a sample instead."""
    stages = {node.folder: node.stage for node in recipe.nodes()}
    return any(row.plan is not None and stages[row.name] != "data" for row in rows)


def invoked() -> str:
    """How this program was called, so that printed commands work as printed: `hone` if it is on the PATH."""
    program = Path(sys.argv[0])
    if program.stem != "hone":
        return f"{os.path.relpath(sys.executable)} -m hone"
    found = shutil.which("hone")
    if found and Path(found).absolute() == program.absolute():
        return "hone"
    return min(os.path.relpath(program), str(program.absolute()), key=len)


def _redo(options: dict[str, str]) -> tuple[str, ...]:
    """The stages to make again; --redo without a value is all of them."""
    names = tuple(name for name in options.get("redo", "").split(",") if name)
    return ("all",) if names == ("true",) else names


OF_REPORT = ("price_per_hour", "grid", "pue", "target_loss")
_ABOUT_REPORT = """usage: hone report LINE_FOLDER [--price_per_hour=3.4] [--grid=DE] [--pue=1.2] [--target_loss=2.5]

Reads the line's artifacts and writes LINE_FOLDER/report/index.html, report.md and report.json.
  --price_per_hour=USD   price of an hour of the machine: also prices of runs and tokens
  --grid=NAME            g CO2e/kWh, or a grid or kind of plant of the catalogue (SE, 'DE 2020', wind): also carbon of runs and tokens
  --pue=1.2              power of the building over that of the machine, for --grid
  --target_loss=NATS     validation loss: also the time until trainings reached it"""


def _rates(options: dict[str, str]) -> Any:
    """What is stated for the section on money and carbon; None where nothing is. SpecError: a value that is no number."""
    from hone.base.errors import SpecError
    from hone.cost.carbon.footprint import grid_g_per_kwh
    from hone.report.sections.prices import Rates

    if not {*OF_REPORT} & {*options}:
        return None
    numbers: dict[str, float] = {}
    for name in ("price_per_hour", "pue", "target_loss"):
        if name in options:
            try:
                numbers[name] = float(options[name])
            except ValueError:
                numbers[name] = 0.0
            if not 0 < numbers[name] < 1e12 or (name == "pue" and numbers[name] < 1):
                raise SpecError(
                    f"--{name}={options[name]} is not a number above {1 if name == 'pue' else 0}",
                    fix=f"write --{name}=1.2",
                )
    grams, source = grid_g_per_kwh(options["grid"]) if "grid" in options else (None, "")
    return Rates(numbers.get("price_per_hour"), grams, source, numbers.get("pue", 1.0), numbers.get("target_loss"))


def report(words: list[str], options: dict[str, str]) -> int:
    """Writes a line's report."""
    from hone.base.partial import PULL, need_local
    from hone.report import build

    if "help" in options:
        print(_ABOUT_REPORT)
        return 0
    only(words, options, OF_REPORT)
    folder = need(words, "LINE_FOLDER")
    need_local(folder, PULL)
    print(build(Path(folder), rates=_rates(options)))
    return 0
