"""The command line: a thin layer over the Python API; every option is a field of a spec."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

HELP = """hone: language models cheap to build and cheap to run, and what every optimization cost and saved.

usage: hone VERB [ARGUMENT] [--field=value ...]

a whole line
  run RECIPE        make every stage of a recipe that is not there yet, then its report
  report LINE       draw the report of a line's artifacts again
one stage (hone VERB --help lists its fields)
  data SOURCE       text to curated, tokenized, packed shards
  train DATA        a model from packed shards
  compress MODEL    quantize, prune
  eval MODEL        perplexity, bits per byte, distance to a reference
  bench MODEL       a measured serving run: tokens/s, latency, memory
object stores (s3://, gs://, ...)
  push FOLDER URL   copy an artifact there; a URL with hone.json is whole
  pull URL FOLDER   copy an artifact here, every file checked
using a model
  serve MODEL       an OpenAI-compatible server
  generate MODEL PROMPT   continue a text
looking
  show THING        a recipe, an artifact or a model folder in words
  redecide DATA     what other filters would keep of what a data stage read
  schema [STAGE]    the JSON schema of a stage, or of all
  techniques [SLOT] every technique: slot, name, paper, file
  calibrate         measure this machine's bandwidth and matmul rates, for estimates

options for all: --out=FOLDER --device=cpu|cuda --redo --quiet --help --version
for data also: --executor=serial|processes|ray --workers=N (the files are the same with each)
"""

_RUN_OPTIONS = ("out", "device", "redo", "quiet", "work", "help", "version", "executor", "workers")
_FLAGS = ("redo", "quiet", "help", "version")
_MAIN_ROLE = {"train": "data", "compress": "model", "eval": "model", "bench": "model"}
_STAGE_OF = {"bench": "serve"}
_USAGES = {
    "report": "LINE_FOLDER\n\nReads the line's artifacts and writes LINE_FOLDER/report/index.html, report.md and report.json.",
    "show": "RECIPE.yaml | FOLDER\n\nPrints a recipe with every field (the print is a recipe again), or an artifact with its figures.",
    "techniques": "[SLOT | NAME]\n\nLists every technique, those of one slot, or the fields of one technique.",
    "calibrate": "[--device=cuda]\n\nMeasures bandwidth and matmul rates of this machine (a few seconds) and keeps them for estimates.",
}
"""What --help says of verbs without fields."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 2 a user's mistake, 130 interrupted."""
    from hone.base.errors import HoneError

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except HoneError as error:
        return _complain(error.what, error.fix)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _complain(
                f"no space left while writing {error.filename or 'a file'}",
                "free some space and run the same command again; it resumes",
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return _complain(f"not allowed: {error.strerror}: {error.filename}", "give a folder you may read and write")
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP):
            return _complain(f"cannot use {error.filename}: {error.strerror}", "give another path")
        raise


def _complain(what: str, fix: str) -> int:
    print(f"error: {what}\nfix: {fix}", file=sys.stderr)
    return 2


def _dispatch(arguments: list[str]) -> int:
    from hone.base.errors import SpecError
    from hone.base.partial import PULL, need_local

    words, options = parse(arguments)
    if not words:
        if "version" in options:
            from importlib.metadata import version

            print(f"hone {version('hone-llm')}")
        else:
            print(HELP, end="")
        return 0
    verbs: dict[str, Callable[[list[str], dict[str, str]], int]] = {
        "run": _run,
        "report": _report,
        **dict.fromkeys(("data", *_MAIN_ROLE), _stage),
        **dict.fromkeys(("push", "pull"), _copy),
        "serve": _serve,
        "generate": _generate,
        "show": _show,
        "redecide": _redecide,
        "schema": _schema,
        "techniques": _techniques,
        "calibrate": _calibrate,
    }
    verb = words[0]
    if verb not in verbs:
        import difflib

        near = difflib.get_close_matches(verb, verbs, n=1)
        raise SpecError(
            f"unknown command '{verb}'", fix=f"{f'did you mean hone {near[0]}? ' if near else ''}hone --help lists them"
        )
    if "help" in options and verb in _USAGES:
        print(f"usage: hone {verb} {_USAGES[verb]}")
        return 0
    if verb in ("report", "serve", "generate") and len(words) > 1:
        need_local(words[1], PULL)
    return verbs[verb](words, options)


def parse(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Splits arguments into words and options: `--a.b=c`, `--a.b c`, or a bare flag (value 'true')."""
    words: list[str] = []
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "-help"):
            options["help"] = "true"
        elif not argument.startswith("--"):
            words.append(argument)
        else:
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_") if name.replace("-", "_") in ("api_key", "chat_template") else name
            if not equals and name not in _FLAGS and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif not equals:
                value = "true"
            options[name] = value
    return words, options


def _need(words: list[str], what: str) -> str:
    from hone.base.errors import SpecError

    if len(words) < 2 or not words[1]:
        raise SpecError(
            f"hone {words[0]} needs {what}", fix=f"hone {words[0]} {what}; hone {words[0]} --help says more"
        )
    if len(words) > 2:
        fix = f"name several as --source='[{', '.join(words[1:])}]'" if words[0] == "data" else "options start with --"
        raise SpecError(f"hone {words[0]} takes one {what}, got {' '.join(words[1:])}", fix=fix)
    return words[1]


def _circumstances(options: dict[str, str]):
    """The Run that `--device`, `--redo` and `--quiet` ask for; checks that the device exists."""
    from hone.base.errors import MachineError
    from hone.base.run import Run
    from hone.data.executors.choose import from_options
    from hone.measure.machine import describe

    device = options.get("device", "cpu")
    if device != "cpu":
        import torch

        if not device.startswith("cuda") or not torch.cuda.is_available():
            raise MachineError(
                f"no device '{device}' on this machine", fix="use --device=cpu, or run where torch.cuda.is_available()"
            )
    return Run(
        device=device,
        redo="redo" in options,
        quiet="quiet" in options,
        executor=from_options(options),
        machine=describe(device).model_dump(mode="json"),
    )


def _spec_options(options: dict[str, str]) -> dict[str, str]:
    """The options that are no circumstances: fields of stages, and inputs."""
    return {
        name: value for name, value in options.items() if name not in _RUN_OPTIONS and not name.startswith("executor.")
    }


def _run(words: list[str], options: dict[str, str]) -> int:
    from hone.base.artifact import Artifact
    from hone.recipe import Node, Recipe

    if "help" in options:
        print(
            "usage: hone run RECIPE [--STAGE.FIELD=VALUE ...] [--work=FOLDER] [--redo=STAGE|drifted|all] [--device=cuda]\n"
            "       [--executor=processes|ray] [--workers=N]\n\n"
            "Makes every stage of the recipe that is not there yet, resumes an interrupted one, then draws the report.\n"
            "A stage is addressed by its kind when only one is of that kind (--data.source=PATH), else by its folder\n"
            "name (--train-base.steps=100). hone show RECIPE prints all fields."
        )
        return 0
    recipe = Recipe.load(_need(words, "RECIPE"))
    recipe = recipe.override(_spec_options(options))
    redo = tuple(name for name in options.pop("redo", "").split(",") if name)
    if redo == ("true",):
        redo = ("all",)
    run = _circumstances(options)
    _calibrate_once(run)
    started = time.monotonic()

    def watch(position: int, total: int, node: Node, artifact: Artifact, made: bool) -> None:
        took = artifact.figures.get("time_s")
        predicted = (
            f", predicted {took.estimate.value:.1f} s" if took and took.estimate and not took.estimate.bound else ""
        )
        note = "there already"
        if made and took and took.value is not None:
            note = f"{took.value:.1f} s{predicted}"
        run.say(f"[{position}/{total}] {node.folder:24} {note}")

    work = options.get("work", "work")
    line = recipe.run(work, run, redo, watch)
    from hone.report import build

    page = build(line)
    models = [node.folder for kind in ("compress", "train") for node in recipe.nodes() if node.stage == kind]
    served = f"  hone serve {line / models[0]}\n" if models else ""
    one = sum(node.stage == "data" for node in recipe.nodes()) == 1
    yours = f"\n  hone run {words[1]} --data.source=YOUR_TEXT_FOLDER --work=work/yours" if one else ""
    print(
        f"\ndone in {time.monotonic() - started:.0f} s; the report: {page}\n\ntry next:\n"
        f"{served}"
        f"  hone compress YOUR_HUGGING_FACE_FOLDER --steps=rtn --out=work/mine{yours}"
    )
    return 0


def _dtype(device: str) -> str:
    """The number format that work on `device` mostly runs in."""
    return "float32" if device == "cpu" else "bfloat16"


def _calibrate_once(run) -> None:
    """Fills in this machine's calibration (measured once, then cached), so that estimates are predictions, not bounds."""
    from hone.measure.calibrate import calibrate
    from hone.measure.machine import Machine

    machine = Machine.model_validate(run.machine)
    if machine.calibration is None:
        machine = machine.model_copy(update={"calibration": calibrate(run.device, _dtype(run.device))})
        run.machine = machine.model_dump(mode="json")


def _stage(words: list[str], options: dict[str, str]) -> int:
    from hone.base.artifact import Artifact
    from hone.base.errors import SpecError
    from hone.recipe import describe_artifact, stage_class

    verb = words[0]
    cls = stage_class(_STAGE_OF.get(verb, verb))
    if "help" in options:
        print(_stage_help(verb, cls))
        return 0
    inputs = {name.removeprefix("from."): value for name, value in options.items() if name.startswith("from.")}
    changes = {name: value for name, value in _spec_options(options).items() if not name.startswith("from.")}
    if verb == "data":
        if len(words) > 1:
            changes["source"] = _need(words, "SOURCE")
    elif len(words) > 1 or _MAIN_ROLE[verb] not in inputs:
        inputs[_MAIN_ROLE[verb]] = _need(words, _MAIN_ROLE[verb].upper())
    if "out" not in options:
        raise SpecError(f"hone {verb} needs --out=FOLDER", fix=f"add --out=work/mine/{cls.stage}-NAME")
    parents = {role: Artifact.read(folder) for role, folder in inputs.items()}
    spec = cls.from_overrides(changes)
    run = _circumstances(options)
    _calibrate_once(run)
    run.command = shlex.join(["hone", *words, *(f"--{name}={value}" for name, value in options.items())])
    artifact = spec.make(options["out"], parents, run)
    print(describe_artifact(artifact))
    return 0


def _stage_help(verb: str, cls) -> str:
    roles = ", ".join(f"{role}{'' if required else ' (optional)'}" for role, required in cls.roles.items())
    lines = [
        f"usage: hone {verb} {'SOURCE' if verb == 'data' else _MAIN_ROLE.get(verb, 'MODEL').upper()} --out=FOLDER [--field=value ...]",
        "",
        (cls.__doc__ or "").strip().splitlines()[0],
    ]
    if roles:
        lines += ["", f"inputs: {roles}; give one with --from.ROLE=FOLDER"]
    lines += ["", "fields:"]
    lists = "Lists and techniques with options stand in brackets: --field='[NAME, {kind: NAME, option: value}]'."
    return "\n".join([*lines, _fields(cls), "", f"{lists} `hone techniques SLOT` says what they are."])


def _fields(cls) -> str:
    from hone.base.spec import describe_fields

    return "\n".join(
        f"  --{name}={kind}\n        {description} ({default if default == 'required' else f'default: {default}'})"
        for name, kind, default, description in describe_fields(cls)
    )


def _copy(words: list[str], options: dict[str, str]) -> int:
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
    unknown = [name for name in options if name not in ("redo", "quiet")]
    if len(words) != 3 or unknown:
        raise SpecError(f"hone {words[0]} takes {takes}, --redo and --quiet", fix=f"hone {words[0]} --help says more")
    run = Run(redo="redo" in options, quiet="quiet" in options)
    if words[0] == "push":
        print(f"{words[2]}: {store.push(words[1], words[2], run)} files sent")
    else:
        print(describe_artifact(store.pull(words[1], words[2], run)))
    return 0


def _serve(words: list[str], options: dict[str, str]) -> int:
    from hone.serve.http import ServerSpec, serve

    if "help" in options:
        print(
            "usage: hone serve MODEL_FOLDER [--port=8000] [--field=value ...]\n\nAn OpenAI-compatible server over the folder's model.\n\nfields:"
        )
        print(_fields(ServerSpec))
        return 0
    folder = _need(words, "MODEL_FOLDER")
    changes = {name: value for name, value in options.items() if name not in _RUN_OPTIONS}
    spec = ServerSpec.from_overrides(changes)
    serve(folder, spec, run=_circumstances(options))
    return 0


def _generate(words: list[str], options: dict[str, str]) -> int:
    from hone.base.errors import SpecError
    from hone.serve.request import SamplingParams

    if "help" in options:
        print(
            "usage: hone generate MODEL_FOLDER PROMPT [--max_tokens=64] [--temperature=0] [--field=value ...]\n\nfields:"
        )
        print(_fields(SamplingParams))
        return 0
    if len(words) != 3:
        raise SpecError(
            "hone generate needs MODEL_FOLDER and PROMPT", fix='hone generate work/tiny/train-base "import "'
        )
    changes = {name: value for name, value in options.items() if name not in _RUN_OPTIONS}
    params = SamplingParams.from_overrides({"max_tokens": "64", "temperature": "0", **changes})
    run = _circumstances(options)
    from hone.model.hf import Checkpoint
    from hone.serve.engine import Engine
    from hone.serve.sizing import first_unserved

    unserved = first_unserved(Checkpoint(words[1]).config)
    if unserved is not None:
        from hone.model.incremental import write

        print(words[2] + write(words[1], words[2], device=run.device, **params.without_engine(unserved[1])))
        return 0
    engine = Engine(words[1], device=run.device)
    for completion in engine.generate([words[2]], params):
        print(words[2] + completion.text)
    return 0


def _report(words: list[str], options: dict[str, str]) -> int:
    from hone.report import build

    print(build(Path(_need(words, "LINE_FOLDER"))))
    return 0


def _show(words: list[str], options: dict[str, str]) -> int:
    from hone.base.artifact import Artifact
    from hone.recipe import Recipe, describe_artifact

    thing = Path(_need(words, "RECIPE_OR_FOLDER"))
    if thing.suffix in (".yaml", ".yml"):
        print(Recipe.load(thing).full(), end="")
    else:
        print(describe_artifact(Artifact.read(thing)))
    return 0


def _redecide(words: list[str], options: dict[str, str]) -> int:
    from hone.data.filters.redecide import Redecide, redecide

    if "help" in options:
        about = "Says what other filters would keep of all that a data stage read, in seconds: the texts are not read again."
        print(f"usage: hone redecide DATA_FOLDER [--field=value ...]\n\n{about}\n\nfields:\n{_fields(Redecide)}")
        return 0
    folder = _need(words, "DATA_FOLDER")
    for line in redecide(folder, Redecide.of(folder).override(options).filters).lines():
        print(line)
    return 0


def _schema(words: list[str], options: dict[str, str]) -> int:
    from hone.base.stage import STAGES
    from hone.recipe import Recipe, stage_class

    names = [words[1]] if len(words) > 1 else [*STAGES]
    schemas = {name: stage_class(name).model_json_schema() for name in names}
    if len(words) == 1:
        schemas["recipe"] = Recipe.model_json_schema()
    print(json.dumps(schemas if len(schemas) > 1 else schemas[names[0]], indent=1))
    return 0


def _techniques(words: list[str], options: dict[str, str]) -> int:
    from hone.base.table import describe

    print("\n".join(describe(words[1] if len(words) > 1 else None)))
    return 0


def _calibrate(words: list[str], options: dict[str, str]) -> int:
    from hone.measure.calibrate import calibrate

    run = _circumstances(options)
    for row in calibrate(run.device, _dtype(run.device), fresh=True).table():
        print("  ".join(str(cell) for cell in row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
