"""CORS: which web pages may call the server from a browser."""

from __future__ import annotations

from typing import Any

from fastapi.middleware.cors import CORSMiddleware

from hone.serve.http.spec import ServerSpec


def with_cors(app: Any, spec: ServerSpec) -> Any:
    """`app`, which answers pages of `spec.allowed_origins` too; itself without any, so that requests pass no further layer."""
    if not spec.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=spec.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-hone-ignored-fields", "retry-after"],
    )
