"""Verbs that make or move one artifact: data, train, compress, eval, bench, push, pull."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from hone.cli.idle import need_effect
from hone.cli.launch import OPTION
from hone.cli.machine.binding import bind_rank
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
    say_doubt,
)

OF_A_STAGE = ("out", "device", "redo", "quiet", "plan", "mesh", "from.", "numa_binding", "power_trace")
OF_BENCH = (*OF_A_STAGE, "clock.")
OF_DATA = (*OF_A_STAGE, "executor", "workers", "executor.")
OF_COMPRESS = (*OF_A_STAGE, OPTION)
OF_TRAIN = (*OF_COMPRESS, "wandb.", "profiling.", "clock.")


def make(words: list[str], options: dict[str, str]) -> int:
    """Makes one artifact from a stage's fields and its parents' folders; with --plan prints the estimates instead."""
    from hone.base.artifact import MANIFEST, Artifact
    from hone.base.errors import SpecError
    from hone.base.spec import parse_scalar
    from hone.cli.artifacts import describe_artifact
    from hone.recipe import plan_stage, stage_class

    verb = words[0]
    cls = stage_class(STAGE_OF.get(verb, verb))
    if "help" in options:
        print(_help(verb, cls))
        return 0
    known = {"data": OF_DATA, "train": OF_TRAIN, "compress": OF_COMPRESS, "bench": OF_BENCH}.get(verb, OF_A_STAGE)
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
    else:
        scored = verb == "eval" and len(words) == 3
        if scored:
            _scored(words[2], inputs, changes)
        if len(words) > 1 or all(name.partition(".")[0] != MAIN_ROLE[verb] for name in inputs):
            inputs[MAIN_ROLE[verb]] = need(words[:2] if scored else words, MAIN_ROLE[verb].upper())
    foreign = [name for name in changes if name in (*CIRCUMSTANCES, "work")]
    if foreign:
        only(words, {foreign[0]: ""}, known)
    if "out" not in options and "plan" not in options:
        raise SpecError(f"hone {verb} needs --out=FOLDER", fix=f"add --out=work/mine/{cls.stage}-NAME")
    spec = cls.from_overrides(changes)
    _need_inputs(verb, spec, inputs)
    spec.check_roles(inputs)
    need_effect(verb, spec, inputs, changes)
    parents = {role: Artifact.read(folder) for role, folder in inputs.items()}
    run = circumstances(options)
    if verb in ("train", "teach", "compress", "eval") and "plan" not in options:
        bind_rank(run)
    if "mesh" in options and "plan" not in options:
        fix = f"add --plan; --{OPTION}=N starts ranks here, torchrun --nproc-per-node=N -m hone {verb} also on several hosts"
        raise SpecError("--mesh is for plans", fix=fix)
    elsewhere = "x" in options.get("mesh", "")  # a data sheet is not measured
    # The plan of data measures a sample, so that curation needs neither a calibration nor torch.
    if verb != "data" and not elsewhere:
        run = calibrated(run, lambda: _needs_rates(spec, options, parents, run))
    if "mesh" in options:
        from hone.cli.mesh import planned_run

        run = planned_run(options["mesh"], run)
    if "plan" in options:
        from hone.cli.tables import show_plan

        out = Path(options.get("out", f"{cls.stage}-NAME"))
        if verb != "data":
            say_doubt(run)
        return show_plan([plan_stage(spec, out, parents, run)], run)
    run.command = shlex.join(["hone", *words, *(f"--{name}={value}" for name, value in options.items())])
    if verb != "data" and (run.redo or not (Path(options["out"]) / MANIFEST).exists()):
        say_doubt(run)
    artifact = spec.make(options["out"], parents, run)
    if run.mesh.leads:
        print(describe_artifact(artifact))
    return 0


def _scored(what: str, inputs: dict[str, str], changes: dict[str, str]) -> None:
    """Takes the second argument of `eval`: a data folder, or a text."""
    from hone.base.errors import SpecError
    from hone.base.spec import parse_scalar
    from hone.feed.facts import DataFacts

    given = ["--text"] * ("text" in changes) + ["--from.data"] * ("data" in inputs)
    if given:
        raise SpecError(f"two texts are given: {what} and {given[0]}", fix="hone eval MODEL TEXT_OR_DATA --out=FOLDER")
    if (Path(what) / DataFacts.mark).exists():
        inputs["data"] = what
    else:
        changes["text"] = what if parse_scalar(what) == what else f"./{what}"  # a file may be called null or 2024


def _need_inputs(verb: str, spec: Any, inputs: dict[str, str]) -> None:
    """Raises SpecError, with an option as the way out, for an input that is not given."""
    from hone.base.errors import SpecError

    if verb == "eval" and spec.text is None and "data" not in inputs:
        raise SpecError(
            "hone eval needs something to score the model on",
            fix="hone eval MODEL FILE.txt --out=FOLDER; JSONL, Parquet, a folder of texts or of a data stage will do as well",
        )
    for role, required in spec.roles.items():
        if required and not any(name.partition(".")[0] == role for name in inputs):
            raise SpecError(f"hone {verb} needs the input '{role}'", fix=f"add --from.{role}=FOLDER")


def _needs_rates(spec: Any, options: dict[str, str], parents: dict[str, Any], run: Any) -> bool:
    """Whether the command estimates anything: not where the artifact is there, nor with a mistake, which it says next."""
    from hone.base.artifact import finished
    from hone.base.errors import HoneError
    from hone.recipe import mistaken, plan_stage

    out = Path(options.get("out", "NAME"))
    if "plan" in options:
        return not mistaken(plan_stage(spec, out, parents, run))
    try:
        made = finished(out, kind=spec.stage, spec=spec, parents=parents, files=spec.files(), run=run)
    except HoneError:
        return run.redo
    return made is None and plan_stage(spec, out, parents, run).problem is None


def _help(verb: str, cls) -> str:
    roles = ", ".join(f"{role}{'' if required else ' (optional)'}" for role, required in cls.roles.items())
    argument = {"data": "SOURCE ...", "eval": "MODEL [TEXT | DATA]"}.get(verb) or MAIN_ROLE[verb].upper()
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
    from hone.cli.artifacts import describe_artifact

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
