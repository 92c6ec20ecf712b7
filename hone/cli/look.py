"""Verbs that only read: show, redecide, schema, techniques, env, calibrate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.cli.options import at_most, circumstances, dtypes_on, kernels_of, list_fields, need, only

_ABOUT = {
    "show": "RECIPE.yaml | SERVE.yaml | FOLDER\n\nPrints a recipe with every field (a valid recipe), a file of `hone serve --config` "
    "likewise, or an artifact\nwith its figures.",
    "redecide": "DATA_FOLDER [--field=value ...]\n\nPrints what other filters would keep of a data stage's input, in seconds: the "
    "texts are not read again.",
    "schema": "[STAGE]\n\nPrints the JSON schema of one stage, or of all and of a recipe.",
    "techniques": "[SLOT | NAME]\n\nLists every technique, those of one slot, or the fields of one technique.",
    "env": "\n\nPrints versions, machine and settings that decide how hone runs here: a block for bug reports.",
    "calibrate": "[--device=cuda] [--report[=FOLDER]] [--quick]\n\nMeasures bandwidth and matmul rates of this machine (a few seconds) and "
    "stores them for estimates. Under torchrun also the\nseconds of collectives between the ranks. With --report also the whole memory hierarchy, "
    "links and disk,\nas a table here, a page, Markdown and JSON in FOLDER (default: machine); --quick: fewer and shorter turns.",
}


def _explained(words: list[str], options: dict[str, str]) -> bool:
    """Prints a verb's usage for --help; returns whether it did."""
    if "help" in options:
        print(f"usage: hone {words[0]} {_ABOUT[words[0]]}")
    return "help" in options


def show(words: list[str], options: dict[str, str]) -> int:
    """Prints a recipe or an artifact."""
    from hone.base.artifact import Artifact
    from hone.base.spec import read_yaml
    from hone.cli.artifacts import describe_artifact
    from hone.model.folder import no_whole_model
    from hone.recipe import Recipe
    from hone.serve.http import ServeConfig

    if _explained(words, options):
        return 0
    only(words, options)
    thing = Path(need(words, "RECIPE_OR_FOLDER"))
    if thing.suffix in (".yaml", ".yml"):
        values = read_yaml(thing)
        if isinstance(values, dict) and not {"line", "stages"} & {*values}:
            print(ServeConfig.from_overrides({}, thing).to_yaml(), end="")
        else:
            print(Recipe.load(thing).full(), end="")
    else:
        artifact = Artifact.read(thing)
        if artifact.kind == "foreign" and (error := no_whole_model(artifact.folder)) is not None:
            raise error
        print(describe_artifact(artifact, whole=True))
    return 0


def redecide(words: list[str], options: dict[str, str]) -> int:
    """Prints what other filters would keep of a data artifact."""
    from hone.base.errors import MissingExtra
    from hone.data.filters.decide import Redecide
    from hone.data.filters.decide import redecide as decide_again

    if _explained(words, options):
        print(f"\nfields:\n{list_fields(Redecide)}")
        return 0
    MissingExtra.need("redecide", "pyarrow", "data")
    folder = need(words, "DATA_FOLDER")
    for line in decide_again(folder, Redecide.of(folder).override(options).filters).lines():
        print(line)
    return 0


def schema(words: list[str], options: dict[str, str]) -> int:
    """Prints JSON schemas."""
    from hone.base.stage import STAGES
    from hone.recipe import Recipe, stage_class

    if _explained(words, options):
        return 0
    only(words, options)
    at_most(words, 1, "one STAGE")
    names = [words[1]] if len(words) > 1 else [*STAGES]
    schemas = {name: stage_class(name).model_json_schema() for name in names}
    if len(words) == 1:
        schemas["recipe"] = Recipe.model_json_schema()
    print(json.dumps(schemas if len(schemas) > 1 else schemas[names[0]], indent=1))
    return 0


def techniques(words: list[str], options: dict[str, str]) -> int:
    """Lists techniques."""
    from hone.base.table import describe

    if _explained(words, options):
        return 0
    only(words, options)
    at_most(words, 1, "one SLOT or NAME")
    print("\n".join(describe(words[1] if len(words) > 1 else None)))
    return 0


_PACKAGES = (
    "torch", "triton", "numpy", "numba", "pyarrow", "pydantic", "safetensors", "tokenizers", "transformers", "compressed-tensors",
    "bitsandbytes", "fastapi", "uvicorn", "ray",
)  # fmt: skip
"""Packages that `env` names, also where they are missing."""


def env(words: list[str], options: dict[str, str]) -> int:
    """Prints what a bug report needs."""
    import os
    from importlib.metadata import PackageNotFoundError, version

    from hone.base.figure import human_bytes
    from hone.base.provenance import provenance
    from hone.measure.compilers import LIMITS
    from hone.measure.machine import describe

    if _explained(words, options):
        return 0
    only(words, options)
    at_most(words, 0, "no argument")
    made, machine = provenance(), describe()

    def there(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} missing"

    commit = f", commit {made['commit']}{' with changes' if made['dirty'] else ''}" if made["commit"] else ""
    rows = {
        "hone": f"{made['hone']}{commit}",
        "python": f"{machine.python}, {machine.os}",
        "cpu": f"{machine.cpu}, {machine.num_cores} cores, {machine.num_threads} threads, {human_bytes(machine.ram_bytes)}",
        "gpus": "; ".join(f"{gpu.name}, {human_bytes(gpu.memory_bytes)}" for gpu in machine.gpus) or "none",
        "packages": ", ".join(there(name) for name in _PACKAGES),
        "limits": ", ".join(f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ) or "none set",
    }
    for name, said in rows.items():
        print(f"{name:9} {said}")
    return 0


def calibrate(words: list[str], options: dict[str, str]) -> int:
    """Measures this machine's rates and prints them."""
    from hone.cli.machine import probe
    from hone.measure.calibrate import calibrate_all

    if _explained(words, options):
        return 0
    only(words, options, ("device", "report", "quick"))
    at_most(words, 0, "no argument")
    probe.check(options)
    run = circumstances(options)
    with run.mesh.together():
        run = replace(run, device=run.mesh.place(run.device))  # each rank its own GPU
        quick = "quick" in options
        kernels, dtypes = kernels_of(run.device, quick=quick), dtypes_on(run.device)
        # Rates of a quick probe are of one dtype and lack fp8's: those that are stored already are taken, else none are stored.
        measured = run.mesh.from_leader(
            lambda: calibrate_all(
                run.device, dtypes[:1] if quick else dtypes, fresh=not quick, kernels=kernels, keep=not quick
            )
        )
        if run.mesh.world_size > 1 and measured is not None:
            measured = _with_collectives(run, measured, keep=not quick)
    if run.mesh.leads and measured is not None:
        if "report" in options:
            probe.report(options, run, measured)
            return 0
        for row in measured.table():
            print("  ".join(str(cell) for cell in row))
    return 0


def _with_collectives(run: Any, calibration: Any, *, keep: bool) -> Any:
    """`calibration` with what collectives take between the ranks; with `keep` rank 0 stores it."""
    from hone.measure.calibration import keep_calibration
    from hone.measure.machine import describe, identity
    from hone.parallel.collectives.measure import measure, measure_beside

    rows, beside = measure(run.mesh, run.device), measure_beside(run.mesh, run.device)
    others = tuple(one for one in calibration.collectives if one.ranks not in {row.ranks for row in rows})
    found = calibration.model_copy(update={"collectives": (*others, *rows), "beside": beside})
    if keep and run.mesh.leads:
        keep_calibration(identity(describe(run.device)), found)
    return found
