"""The page at `/`: a chat with the served model in a browser, one file without anything from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response

from hone.report.live.inline import headers_of


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The file and the headers it is sent with, which let a browser run its own script and style and nothing else."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf8")
    return text.encode(), headers_of(text)


async def page(request: HttpRequest) -> Response:
    """GET /. It holds nothing of the server, so it needs no key; what it asks the server for does."""
    content, headers = _page()
    return Response(content, headers=headers, media_type="text/html; charset=utf-8")
