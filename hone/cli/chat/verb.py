"""The verb `chat`: reads its options, opens the model, runs the session."""

from __future__ import annotations

from typing import Any

from hone.cli.options import circumstances, fields, list_fields, need, only

_USAGE = """usage: hone chat MODEL_FOLDER [--system=TEXT] [--temperature=0.7] [--field=value ...] [--device=cuda] [--quiet]
       hone chat --url=http://HOST:PORT [--field=value ...]

Talks with a model in the terminal: the model of a folder, or that of a running server with OpenAI's API. /help lists the
commands, Ctrl-C stops an answer, Ctrl-D ends. Where input is no terminal, every line of it is a question (or a command),
and answers go to standard output.
"""
OF_CHAT = ("device", "quiet")


def chat(words: list[str], options: dict[str, str]) -> int:
    """Talks with a model until the input ends."""
    from hone.base.spec import describe_fields
    from hone.cli.chat.spec import NOT_SHOWN, ChatSpec
    from hone.serve.request import SamplingParams

    left_out = (*NOT_SHOWN, "engine.max_waiting")
    if "help" in options:
        sampling = list_fields(SamplingParams, (*left_out, "max_tokens"))
        print(f"{_USAGE}\nfields:\n{list_fields(ChatSpec, left_out)}\n{sampling}")
        return 0
    known = [name for cls in (ChatSpec, SamplingParams) for name, *_ in describe_fields(cls) if name not in left_out]
    changes = fields(options, *OF_CHAT)
    # Fields of a technique and of a form of output have dots; their spec checks them.
    only(words, dict.fromkeys(changes, ""), [*known, "engine.", "structured_outputs.", *OF_CHAT])
    own = {name: value for name, value in changes.items() if name.partition(".")[0] in ChatSpec.model_fields}
    spec = ChatSpec.from_overrides(own)
    sampling = {name: value for name, value in changes.items() if name not in own or name == "max_tokens"}
    SamplingParams.from_overrides(sampling)  # a mistake is found before the model is loaded
    return _talk(_opened(words, spec, own, options), spec, sampling, options)


def _opened(words: list[str], spec: Any, own: dict[str, str], options: dict[str, str]) -> Any:
    """The model of the folder, or of the server."""
    from hone.base.errors import SpecError
    from hone.base.partial import PULL, need_local
    from hone.cli.chat.spec import OF_A_FOLDER, OF_A_SERVER

    given = [name for name in (*own, *options) if name.partition(".")[0] in (*OF_A_FOLDER, "device")]
    if spec.url:
        if len(words) > 1:
            raise SpecError(
                f"a folder and a server are given: {words[1]} and --url={spec.url}", fix="keep one of the two"
            )
        if given:
            raise SpecError(f"--{given[0]} is for a folder, and the server at --url has its own", fix="leave it out")
        from hone.cli.chat.remote import RemoteModel

        return RemoteModel(spec)
    if foreign := [name for name in OF_A_SERVER if name in own]:
        raise SpecError(f"--{foreign[0]} is for a server", fix="give --url=http://HOST:PORT, or leave it out")
    folder = need(words, "MODEL_FOLDER")
    need_local(folder, PULL)
    run = circumstances(options)
    from hone.cli.chat.local import open_local

    with run.progress("loading", None):
        return open_local(folder, spec, run)


def _talk(model: Any, spec: Any, sampling: dict[str, str], options: dict[str, str]) -> int:
    from hone.cli.chat.session import Session, introduced, screen_of

    screen = screen_of(chat=model.chat, quiet="quiet" in options)
    try:
        session = Session(model, screen, sampling, spec.system)
        screen.note(introduced(model, f" at {spec.url}" if spec.url else ""))
        return session.run()
    except KeyboardInterrupt:
        print()
        return 130
    finally:
        model.close()
