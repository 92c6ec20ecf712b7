"""The verb `watch`: a page of running and finished trainings in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hone.cli.options import only

OF_WATCH = ("host", "port")
PORT = 6007
_USAGE = f"""usage: hone watch FOLDER ... [--host=127.0.0.1] [--port={PORT}]

A page of trainings that updates itself: losses, rates, memory, times of the ranks, several runs beside each other. A FOLDER is
the --out of a training that runs, is finished, or has not begun yet, or a folder of such. It reads their logs and changes nothing."""


def watch(words: list[str], options: dict[str, str]) -> int:
    """Serves the page until Ctrl-C."""
    from hone.base.errors import MissingExtra, SpecError
    from hone.base.partial import PULL, need_local

    if "help" in options:
        print(_USAGE)
        return 0
    only(words, options, OF_WATCH)
    if len(words) < 2 or not all(words[1:]):
        raise SpecError("hone watch needs FOLDER", fix="hone watch work/mine/train-base; hone watch --help explains it")
    for folder in words[1:]:
        need_local(folder, PULL)
    given = options.get("port", str(PORT))
    if not given.isdigit() or int(given) > 65535:
        raise SpecError(f"--port={given} is no port", fix=f"write --port={PORT}, or 0 for any that is free")
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra.of("hone watch", "fastapi", "serve") from None
    from hone.report.live.server import serve
    from hone.serve.http.server import listen

    folders = [Path(word).absolute() for word in words[1:]]
    with listen(options.get("host", "127.0.0.1"), int(given)) as sock:
        host, port = sock.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        print(f"watching {', '.join(words[1:])} on http://{shown}:{port}", flush=True)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again when it has ended
            serve(folders, sock)
    return 0
