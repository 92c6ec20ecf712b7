"""What may be written after `hone`: verbs, the options of each, and their values, collected from the specs themselves."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hone.base.spec import Spec, describe_fields
from hone.base.stage import STAGES
from hone.base.table import TABLES, Table
from hone.cli.chat.spec import NOT_SHOWN
from hone.cli.chat.verb import OF_CHAT
from hone.cli.cost.verb import WORDS
from hone.cli.help import HELP
from hone.cli.launch import OPTION
from hone.cli.line import OF_PLAN, OF_REPORT, OF_RUN
from hone.cli.merge.verb import OF_MERGE
from hone.cli.models import OF_EXPORT, OF_GENERATE, OF_SERVE
from hone.cli.options import FLAGS, specs_of
from hone.cli.schedule.verb import OF_SCHEDULE
from hone.cli.simulate.verb import OF_SIMULATE
from hone.cli.stages import OF_A_STAGE, OF_BENCH, OF_COMPRESS, OF_DATA, OF_TRAIN
from hone.cli.watch import OF_WATCH
from hone.cost.catalogue.read import catalogue
from hone.exports import EXPORTS
from hone.measure.clocks import CLOCKS
from hone.measure.topology.placement import BINDINGS
from hone.train.curves.wandb import Wandb
from hone.train.live.profiling import Profiling

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS, RECIPES = "<files>", "<folders>", "<recipes>"
"""In place of words: any file, folders alone, folders and YAML files."""
_STAGES = ("train", "teach", "compress", "eval", "bench")
_CIRCUMSTANCES: dict[str, tuple[str, ...]] = {
    "run": OF_RUN,
    "plan": OF_PLAN,
    "data": OF_DATA,
    **dict.fromkeys(_STAGES, OF_A_STAGE),
    "train": OF_TRAIN,
    "bench": OF_BENCH,
    "compress": OF_COMPRESS,
    "serve": OF_SERVE,
    "generate": OF_GENERATE,
    "chat": OF_CHAT,
    "export": OF_EXPORT,
    "merge": OF_MERGE,
    "simulate": OF_SIMULATE,
    "push": ("redo", "quiet"),
    "pull": ("redo", "quiet"),
    "calibrate": ("device", "report", "quick", OPTION),
    "watch": OF_WATCH,
    "hardware": ("json",),
    "cost": ("json",),
    "report": OF_REPORT,
    "schedule": OF_SCHEDULE,
}
_CHOICES = {
    "device": ("cpu", "cuda"),
    "format": tuple(EXPORTS),
    "executor": ("serial", "processes", "ray", "slurm"),
    "numa_binding": BINDINGS,
}
_ABOUT = {
    "device": "Device: cpu or cuda.",
    "redo": "Make it again.",
    "format": "Format of the file.",
    "quiet": "No progress and no messages.",
    "plan": "Print the estimates, make nothing.",
    "out": "Folder to write.",
    "work": "Folder of all lines.",
    "mesh": "Ranks to plan for, such as 8xH200.",
    "executor": "Where the tasks of a data stage run.",
    "workers": "Processes of the executor.",
    "power_trace": "Record what the device draws beside the stage.",
    OPTION: "Ranks to start on this host.",
    "machine": "GPU of a data sheet, or a file.",
    "numa_binding": "NUMA nodes and cores of the processes.",
    "report": "Probe the whole machine, and write a page into this folder.",
    "quick": "Fewer and shorter turns.",
    "host": "Address to listen on.",
    "port": "Port to listen on.",
    "config": "YAML file of these fields.",
    "json": "Print for a program.",
    "front": "Plans between cheapest, cleanest and soonest.",
    "advice": "Changes, each planned again.",
    "price_per_hour": "Dollars an hour of the machine.",
    "grid": "g CO2e/kWh, or a place.",
    "pue": "Power of the building over that of the machine.",
    "target_loss": "Validation loss to reach.",
    "help": "Print the usage and every field.",
}
_WORD = re.compile(r"[\w.:+-]+")


class Option(NamedTuple):
    """An option without its dashes. `values` are words, or FILES; `flag`: it may stand alone."""

    name: str
    about: str
    values: tuple[str, ...] = ()
    flag: bool = False


def verbs() -> dict[str, str]:
    """Every verb and what it does."""
    return dict(re.findall(r"^  ([a-z]+)(?: [A-Z.\[\]]+)* +([a-z].*)$", HELP, re.M))


def options_of(verb: str) -> list[Option]:
    """The options of a verb."""
    found = [Option(name, _ABOUT[name], flag=True) for name in ("help",)]
    for name in _CIRCUMSTANCES.get(verb, ()):
        if name.endswith("."):
            continue  # those of roles and curves are below; of an executor they depend on its kind
        values = _CHOICES.get(
            name, () if name in ("workers", "mesh", OPTION, *OF_WATCH, *OF_REPORT, *FLAGS) else (FILES,)
        )
        found.append(Option(name, _ABOUT[name], values, name in FLAGS))
    for prefix, specs in (
        ("wandb.", [Wandb]),
        ("profiling.", [Profiling]),
        ("clock.", [CLOCKS[name] for name in CLOCKS]),
    ):
        if prefix in _CIRCUMSTANCES.get(verb, ()):
            found += [one._replace(name=f"{prefix}{one.name}") for one in _fields(*specs) if one.name != "kind"]
    if "clock." in _CIRCUMSTANCES.get(verb, ()):
        found.append(Option("clock.kind", "Policy of the GPU's clock.", tuple(CLOCKS)))
    if verb in ("run", "plan"):
        return [
            *found,
            *(
                one._replace(name=f"{stage}.{one.name}")
                for stage in STAGES
                for one in _fields(*specs_of(stage_verb(stage)))
            ),
        ]
    if verb in (*_STAGES, "data"):
        found += [
            Option(f"from.{role}", f"Folder of the input {role}.", (FILES,))
            for cls in specs_of(verb)
            for role in cls.roles
        ]
    left_out = {"chat": NOT_SHOWN, "export": ("kind",)}.get(verb, ())
    return [*found, *(one for one in _fields(*specs_of(verb)) if one.name not in left_out)]


def stage_verb(stage: str) -> str:
    """The verb that makes a stage."""
    return "bench" if stage == "serve" else stage


def _fields(*specs: type[Spec]) -> Iterator[Option]:
    """The fields of specs, each once, with those of the techniques that they choose."""
    seen: set[str] = set()
    for cls in specs:
        hidden = getattr(cls, "without_effect", ())
        techniques = dict(_choices(cls))
        for name, kind, _, about in describe_fields(cls):
            if name in seen or name in hidden:
                continue
            seen.add(name)
            yield Option(name, about, _values(kind), kind == "bool")
            if name in techniques:
                yield from _of_techniques(name, techniques[name], about)


def _values(kind: str) -> tuple[str, ...]:
    """The words of a type as --help shows it; files for a text, which may be a path."""
    if kind == "bool":
        return ("true", "false")
    names = kind.removeprefix("list of ").split("|")
    words = tuple(one for one in names if _WORD.fullmatch(one) and one not in _TYPES)
    return words or ((FILES,) if {"str", "Path"} & {*names} and not kind.startswith("list") else ())


_TYPES = ("int", "float", "str", "bool", "null", "dict", "list", "Path", "Any", "object")


def _choices(cls: type[Spec], prefix: str = "") -> Iterator[tuple[str, list[Table]]]:
    """(dotted name, tables) of the fields of a spec that are one technique."""
    for name, field in cls.model_fields.items():
        inner: Any = field.annotation
        marks = [*field.metadata]
        if typing.get_origin(inner) not in (list, tuple):
            marks += [mark for part in typing.get_args(inner) for mark in getattr(part, "__metadata__", ())]
        tables = [mark.table for mark in marks if hasattr(mark, "table")]
        if tables and typing.get_origin(inner) not in (list, tuple):
            yield prefix + name, tables
        elif isinstance(inner, type) and issubclass(inner, Spec):
            yield from _choices(inner, f"{prefix}{name}.")


def _of_techniques(name: str, tables: list[Table], about: str) -> Iterator[Option]:
    """`NAME.kind` and the options of all techniques that a field may be."""
    yield Option(f"{name}.kind", about, tuple(kind for table in tables for kind in table))
    seen = {"kind"}
    for table in tables:
        for kind in table:
            for field, type_, _, told in describe_fields(table[kind]):
                if field not in seen:
                    seen.add(field)
                    yield Option(f"{name}.{field}", f"{kind}: {told}", _values(type_))


def arguments_of(verb: str) -> tuple[str, ...]:
    """What the arguments of a verb are: words, or one of FILES, FOLDERS and RECIPES."""
    if verb in ("plan", "run", "show"):
        return (RECIPES,)
    if verb == "schema":
        return tuple(STAGES)
    if verb == "techniques":
        words = [word for slot, names in slots().items() for word in (slot, *names)]
        return tuple(dict.fromkeys(word for word in words if " " not in word))
    if verb == "completion":
        return SHELLS
    if verb == "cost":
        return tuple(WORDS)
    if verb == "hardware":
        return tuple(one.short for one in catalogue().accelerators)
    if verb == "data":
        return (FILES,)
    return () if verb in ("pull", "env", "calibrate") else (FOLDERS,)


def slots() -> dict[str, list[str]]:
    """Slot name to technique names, read from the tables' text: importing them all imports torch."""
    root, found = Path(__file__).parents[3], {}
    for row in TABLES:
        module, _, attribute = row.partition(":")
        file = root / f"{module.replace('.', '/')}.py"
        file = file if file.exists() else root / module.replace(".", "/") / "__init__.py"
        for node in ast.parse(file.read_text(encoding="utf8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute:
                assert isinstance(node.value, ast.Call)
                slot, rows = map(ast.literal_eval, node.value.args)
                found[slot] = [*rows]
    return found
