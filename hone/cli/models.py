"""Verbs that use a model: serve, generate and export."""

from __future__ import annotations

from hone.cli.options import circumstances, fields, list_fields, need

_OF_SERVE = ("device", "quiet")
_OF_EXPORT = ("out", "device", "redo", "quiet")


def serve(words: list[str], options: dict[str, str]) -> int:
    """Serves a model folder over HTTP until stopped."""
    from hone.base.partial import PULL, need_local
    from hone.serve.http import ServerSpec
    from hone.serve.http import serve as serve_forever

    if "help" in options:
        usage = "usage: hone serve MODEL_FOLDER [--port=8000] [--field=value ...]"
        print(f"{usage}\n\nAn OpenAI-compatible server over the folder's model.\n\nfields:\n{list_fields(ServerSpec)}")
        return 0
    folder = need(words, "MODEL_FOLDER")
    need_local(folder, PULL)
    spec = ServerSpec.from_overrides(fields(options, *_OF_SERVE))
    serve_forever(folder, spec, run=circumstances(options))
    return 0


def generate(words: list[str], options: dict[str, str]) -> int:
    """Continues a text."""
    from hone.base.errors import SpecError
    from hone.base.partial import PULL, need_local
    from hone.serve.request import SamplingParams

    if "help" in options:
        usage = "usage: hone generate MODEL_FOLDER PROMPT [--max_tokens=64] [--temperature=0] [--field=value ...]"
        print(f"{usage}\n\nfields:\n{list_fields(SamplingParams)}")
        return 0
    if len(words) != 3:
        raise SpecError(
            "hone generate needs MODEL_FOLDER and PROMPT", fix='hone generate work/tiny/train-base "import "'
        )
    need_local(words[1], PULL)
    changes = fields(options, *_OF_SERVE)
    params = SamplingParams.from_overrides({"max_tokens": "64", "temperature": "0", **changes})
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
    from hone.compress.gguf.export import GGUF
    from hone.compress.gguf.export import export as write_file

    if "help" in options:
        usage = "usage: hone export MODEL_FOLDER --out=FILE.gguf [--type=q4_0] [--redo] [--field=value ...]"
        about = "Writes the folder's model and tokenizer as one file that llama.cpp loads. Codes of int4 and int8 folders are kept."
        print(f"{usage}\n\n{about}\n\nfields:\n{list_fields(GGUF)}")
        return 0
    folder = need(words, "MODEL_FOLDER")
    if "out" not in options:
        raise SpecError("hone export needs --out=FILE.gguf", fix="add --out=model.gguf")
    spec = GGUF.from_overrides(fields(options, *_OF_EXPORT))
    print(write_file(folder, options["out"], circumstances(options), **spec.model_dump()).describe())
    return 0
