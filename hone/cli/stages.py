"""Verbs that make or move one artifact: data, train, compress, eval, bench, push, pull."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from hone.cli.options import (
    CIRCUMSTANCES,
    MAIN_ROLE,
    STAGE_OF,
    at_most,
    calibrated,
    circumstances,
    fields,
    list_fields,
    need,
    only,
)

OF_A_STAGE = ("out", "device", "redo", "quiet", "plan", "mesh", "from.")
OF_DATA = (*OF_A_STAGE, "executor", "workers", "executor.")


def make(words: list[str], options: dict[str, str]) -> int:
    """Makes one artifact from a stage's fields and its parents' folders; with --plan prints the estimates instead."""
    from hone.base.artifact import Artifact
    from hone.base.errors import SpecError
    from hone.base.spec import parse_scalar
    from hone.recipe import describe_artifact, plan_stage, stage_class

    verb = words[0]
    cls = stage_class(STAGE_OF.get(verb, verb))
    if "help" in options:
        print(_help(verb, cls))
        return 0
    known = OF_DATA if verb == "data" else OF_A_STAGE
    inputs = {name.removeprefix("from."): value for name, value in options.items() if name.startswith("from.")}
    changes = fields(options, *known)
    if verb == "data":
        if len(words) > 1:
            if "source" in changes:
                raise SpecError(
                    f"two sources are given: {' '.join(words[1:])} and --source={changes['source']}",
                    fix="give all of them before the options: hone data SOURCE ... --out=FOLDER",
                )
            several = all(words[1:]) and len(words) > 2
            one = "" if several else need(words, "SOURCE")
            # A folder may be called null, 2024 or [drafts]: in a list it is a text.
            listed = several or one[0] in "[{" or parse_scalar(one) != one
            changes["source"] = json.dumps(words[1:], ensure_ascii=False) if listed else one
    elif len(words) > 1 or MAIN_ROLE[verb] not in inputs:
        inputs[MAIN_ROLE[verb]] = need(words, MAIN_ROLE[verb].upper())
    foreign = [name for name in changes if name in (*CIRCUMSTANCES, "work")]
    if foreign:
        only(words, {foreign[0]: ""}, known)
    if "out" not in options and "plan" not in options:
        raise SpecError(f"hone {verb} needs --out=FOLDER", fix=f"add --out=work/mine/{cls.stage}-NAME")
    spec = cls.from_overrides(changes)
    spec.check_roles(inputs)
    parents = {role: Artifact.read(folder) for role, folder in inputs.items()}
    run = circumstances(options)
    if "mesh" in options and "plan" not in options:
        fix = f"add --plan, or start the ranks: torchrun --nproc-per-node=N -m hone {verb}"
        raise SpecError("--mesh is for plans", fix=fix)
    elsewhere = "x" in options.get("mesh", "")  # a data sheet is not measured
    if (
        verb != "data" and not elsewhere
    ):  # its plan measures a sample, so that curation needs neither a calibration nor torch
        run = calibrated(run)
    if "mesh" in options:
        from hone.cli.mesh import planned_run

        run = planned_run(options["mesh"], run)
    if "plan" in options:
        from hone.cli.tables import show_plan

        out = Path(options.get("out", f"{cls.stage}-NAME"))
        return show_plan([plan_stage(spec, out, parents, run)], run)
    run.command = shlex.join(["hone", *words, *(f"--{name}={value}" for name, value in options.items())])
    artifact = spec.make(options["out"], parents, run)
    if run.mesh.leads:
        print(describe_artifact(artifact))
    return 0


def _help(verb: str, cls) -> str:
    roles = ", ".join(f"{role}{'' if required else ' (optional)'}" for role, required in cls.roles.items())
    argument = "SOURCE ..." if verb == "data" else MAIN_ROLE[verb].upper()
    lines = [
        f"usage: hone {verb} {argument} --out=FOLDER [--field=value ...]",
        "",
        (cls.__doc__ or "").strip().splitlines()[0],
    ]
    if roles:
        lines += ["", f"inputs: {roles}; set one with --from.ROLE=FOLDER"]
    lines += ["", "fields:"]
    lists = "Lists and techniques with options are in brackets: --field='[NAME, {kind: NAME, option: value}]'."
    return "\n".join([*lines, list_fields(cls), "", f"{lists} `hone techniques SLOT` describes them."])


def copy(words: list[str], options: dict[str, str]) -> int:
    """Copies an artifact to a URL or from one."""
    from hone.base import store
    from hone.base.errors import SpecError
    from hone.base.run import Run
    from hone.recipe import describe_artifact

    takes = "FOLDER URL" if words[0] == "push" else "URL FOLDER"
    if "help" in options:
        print(
            f"usage: hone {words[0]} {takes} [--redo] [--quiet]\n\n{getattr(store, words[0]).__doc__.splitlines()[0]}"
        )
        return 0
    only(words, options, ("redo", "quiet"))
    at_most(words, 2, takes)
    if len(words) != 3:
        raise SpecError(f"hone {words[0]} takes {takes}, --redo and --quiet", fix=f"hone {words[0]} --help explains it")
    run = Run(redo="redo" in options, quiet="quiet" in options)
    if words[0] == "push":
        print(f"{words[2]}: {store.push(words[1], words[2], run)} files sent")
    else:
        print(describe_artifact(store.pull(words[1], words[2], run)))
    return 0
