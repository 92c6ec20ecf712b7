"""The page at `/`: a chat with the served model in a browser, one file without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The file and the headers it is sent with, which let a browser run its own script and style and nothing else."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf8")
    sources = {}
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        sources[tag] = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{sources['script']}'; style-src 'sha256-{sources['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text.encode(), headers


async def page(request: HttpRequest) -> Response:
    """GET /. It holds nothing of the server, so it needs no key; what it asks the server for does."""
    content, headers = _page()
    return Response(content, headers=headers, media_type="text/html; charset=utf-8")
