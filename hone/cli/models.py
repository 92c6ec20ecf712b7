"""Verbs that use a model: serve, generate and export."""

from __future__ import annotations

from hone.cli.idle import need_effect
from hone.cli.options import circumstances, fields, list_fields, need

OF_SERVE = ("config", "quiet", "numa_binding", "clock.")
OF_GENERATE = ("device", "quiet", "numa_binding")
OF_EXPORT = ("out", "format", "device", "redo", "quiet")


def serve(words: list[str], options: dict[str, str]) -> int:
    """Serves a model folder over HTTP until stopped."""
    from pathlib import Path

    from hone.base.errors import SpecError
    from hone.base.partial import PULL, need_local
    from hone.measure.clocks.governed import from_options
    from hone.serve.http import ServeConfig
    from hone.serve.http import serve as serve_forever

    if "help" in options:
        usage = "usage: hone serve MODEL_FOLDER [--config=FILE.yaml] [--port=8000] [--field=value ...] [--quiet]"
        about = (
            "An OpenAI-compatible server over the folder's model, with a page to chat with it at its address.\n"
            "--config reads these fields from a YAML file; those of the command line come first. hone show FILE.yaml prints\n"
            "it with every field."
        )
        print(f"{usage}\n\n{about}\n\nfields:\n{list_fields(ServeConfig, ServeConfig.without_effect)}")
        return 0
    file = Path(options["config"]) if "config" in options else None
    changes = fields(options, *OF_SERVE)
    folder = need(words, "MODEL_FOLDER") if len(words) > 1 else ""
    if folder and changes.get("model", folder) != folder:
        raise SpecError(f"two models are given: {folder} and --model={changes['model']}", fix="leave --model out")
    spec = ServeConfig.from_overrides(changes, file)
    folder = folder or spec.model or need(words, "MODEL_FOLDER")
    need_local(folder, PULL)
    from_options(options, spec.device, waits=True)
    serve_forever(folder, spec, run=circumstances({**options, "device": spec.device}))
    return 0


def generate(words: list[str], options: dict[str, str]) -> int:
    """Continues a text."""
    from hone.base.errors import SpecError
    from hone.base.partial import PULL, need_local
    from hone.serve.request import SamplingParams

    if "help" in options:
        usage = "usage: hone generate MODEL_FOLDER PROMPT [--max_tokens=64] [--temperature=0] [--field=value ...]"
        print(f"{usage}\n\nfields (here max_tokens is 64 and temperature 0 by default):\n{list_fields(SamplingParams)}")
        return 0
    if len(words) != 3:
        raise SpecError(
            "hone generate needs MODEL_FOLDER and PROMPT", fix='hone generate work/tiny/train-base "import "'
        )
    need_local(words[1], PULL)
    changes = fields(options, *OF_GENERATE)
    params = SamplingParams.from_overrides({"max_tokens": "64", "temperature": "0", **changes})
    need_effect("generate", params, {}, changes)
    run = circumstances(options)
    from hone.model.hf import Checkpoint
    from hone.serve.engine import Engine
    from hone.serve.paging.cache import first_unserved

    unserved = first_unserved(Checkpoint(words[1]).config)
    if unserved is not None:
        from hone.model.incremental import write

        print(words[2] + write(words[1], words[2], device=run.device, **params.without_engine(unserved[1])))
        return 0
    engine = Engine(words[1], device=run.device)
    for completion in engine.generate([words[2]], params):
        print(words[2] + completion.text)
    return 0


def export(words: list[str], options: dict[str, str]) -> int:
    """Writes a model folder as one file of another format."""
    from hone.base.errors import SpecError
    from hone.exports import EXPORTS

    kind = options.get("format", "gguf")
    cls = EXPORTS[kind]
    if "help" in options:
        usage = (
            f"usage: hone export MODEL_FOLDER --out=FILE [--format={'|'.join(EXPORTS)}] [--redo] [--field=value ...]"
        )
        about = f"Writes the folder's model and tokenizer as one file.\n{kind}: {(cls.__doc__ or '').splitlines()[0]}"
        print(f"{usage}\n\n{about}\n\nfields:\n{list_fields(cls, ('kind',))}")
        return 0
    folder = need(words, "MODEL_FOLDER")
    if "out" not in options:
        raise SpecError(f"hone export needs --out=FILE{cls.ending}", fix=f"add --out=model{cls.ending}")
    spec = cls.from_overrides({**fields(options, *OF_EXPORT), "kind": kind})
    print(spec.export(folder, options["out"], circumstances(options)).describe())
    return 0
