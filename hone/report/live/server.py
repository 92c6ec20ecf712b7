"""Serves the page of running trainings: one file, and a stream of events that replaces its body when the logs grow."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from hone.report.live.inline import headers_of
from hone.report.live.reading import Board
from hone.report.live.view import WIDE, fragment
from hone.report.page import stylesheet

if TYPE_CHECKING:
    from fastapi import FastAPI

LOOK_S = 1.0
"""Seconds between looks at the files."""
HEARTBEAT_S = 15.0
"""After so many seconds without news a comment is sent, by which a client that is gone is noticed."""


_RUNS = b"{{ RUNS }}"
"""Where the page has the trainings."""


class Shown:
    """The trainings as pages of each width have them: read at most once in LOOK_S, drawn once a change, for all clients."""

    def __init__(self, folders: list[Path], look_s: float = LOOK_S) -> None:
        self.board, self.look_s = Board(folders), look_s
        self.viewers = 0
        """Clients that have the stream open."""
        self._lock = asyncio.Lock()
        self._looked = float("-inf")
        self._drawn: dict[int, tuple[int, str]] = {}

    async def page(self, width: int) -> tuple[int, str]:
        """(version, fragment) of now."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._looked >= self.look_s:
                await asyncio.to_thread(self.board.poll)
                self._looked = now
            version = self.board.version
            if self._drawn.get(width, (-1, ""))[0] != version:
                if len(self._drawn) > 32:
                    self._drawn.clear()
                self._drawn[width] = version, await asyncio.to_thread(fragment, self.board.runs, float(width))
            return self._drawn[width]

    async def events(self, width: int) -> AsyncIterator[str]:
        """Server-sent events: the fragment as a JSON text, now and whenever it changes."""
        self.viewers += 1
        try:
            sent, silent = -1, 0.0
            while True:
                version, body = await self.page(width)
                if version != sent:
                    sent, silent = version, 0.0
                    yield f"data: {json.dumps(body)}\n\n"
                elif silent >= HEARTBEAT_S:
                    silent = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(self.look_s)
                silent += self.look_s
        finally:
            self.viewers -= 1


def app_of(folders: list[Path], look_s: float = LOOK_S) -> FastAPI:
    """The application; `state.shown` is its `Shown`."""
    from fastapi import FastAPI
    from fastapi.responses import Response, StreamingResponse

    app = FastAPI(openapi_url=None)
    app.state.shown = shown = Shown(folders, look_s)
    content, headers = _page(folders)

    @app.get("/")
    async def page() -> Response:
        _, body = await shown.page(int(WIDE))  # until the first event, and without JavaScript
        return Response(content.replace(_RUNS, body.encode()), headers=headers, media_type="text/html; charset=utf-8")

    @app.get("/events")
    async def events(width: int = int(WIDE)) -> StreamingResponse:
        told = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            shown.events(min(max(width, 100), 4000) // 10 * 10), media_type="text/event-stream", headers=told
        )

    return app


def _page(folders: list[Path]) -> tuple[bytes, dict[str, str]]:
    """The page and its headers, which let a browser run its own script and style and nothing else."""
    live = files("hone.report.live")
    names = ", ".join(dict.fromkeys(folder.name or str(folder) for folder in folders))
    css = stylesheet() + live.joinpath("live.css").read_text(encoding="utf8")
    js, page = (live.joinpath(name).read_text(encoding="utf8") for name in ("live.js", "live.html"))
    for name, value in (("TITLE", escape(names)), ("CSS", Markup(css)), ("JS", Markup(js))):
        page = page.replace("{{ " + name + " }}", str(value))
    return page.encode(), headers_of(page)


def serve(folders: list[Path], sock: socket.socket) -> None:
    """Serves the page of `folders` on a listening socket until Ctrl-C."""
    import uvicorn

    # An open stream has no end of its own, so at Ctrl-C none is waited for.
    options: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 1}
    uvicorn.Server(uvicorn.Config(app_of(folders), **options)).run(sockets=[sock])
