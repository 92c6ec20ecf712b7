"""uvicorn's HTTP protocol with a limit of connections and deadlines for a request's head and body."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

_MARGIN_S = 5.0
"""After the deadline of a body its own reply (408) comes first; this long after it the connection ends in any case."""


@dataclass(frozen=True)
class Limits:
    """Connections at once; seconds for a request's head, and for its body."""

    max_connections: int
    head_s: float
    body_s: float


def raised_file_limit() -> int:
    """Raises this process's limit of open files as far as the system allows; returns it."""
    try:
        import resource
    except ImportError:  # no such limit
        return 2**31
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def guarded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class that uvicorn is to use: httptools' where it is installed, else h11's."""
    if importlib.util.find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base  # type: ignore[assignment]

    class Guarded(Base):  # type: ignore[valid-type, misc]
        """Ends connections whose request does not arrive in time."""

        _deadline: asyncio.TimerHandle | None = None
        _asked: Any = None  # the request whose body is expected by `_deadline`

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "connection": self}  # each request's scope has it as `state`
            if len(self.connections) > limits.max_connections:
                transport.write(_too_many(limits.max_connections))
                transport.close()
                return
            self._within(limits.head_s)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not None and self.cycle is not before:  # a head is complete
                self._asked = None
                self._stop()
            if self.cycle is not None and self.cycle.more_body:
                if self._asked is not self.cycle:
                    self._asked = self.cycle
                    self._within(limits.body_s + _MARGIN_S)
            elif self._asked is not None:
                self._asked = None
                self._stop()
            elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._within(limits.head_s)  # the next head has begun

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _within(self, seconds: float) -> None:
            self._stop()
            self._deadline = self.loop.call_later(seconds, self._end)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _end(self) -> None:
            self._deadline = None
            self.transport.abort()

    return Guarded


class ChunkWriter:
    """Writes parts of a streamed body as HTTP/1.1 chunks to the connection itself: one call instead of the ASGI path's dozen."""

    def __init__(self, connection: Any) -> None:
        self._transport = connection.transport
        self.flow = connection.flow

    @classmethod
    def of(cls, scope: Any) -> ChunkWriter | None:
        """The writer of a request's reply, once its head is sent; None where the body is not sent in chunks."""
        connection = scope.get("state", {}).get("connection")
        if connection is None or scope["http_version"] != "1.1" or scope["method"] == "HEAD":
            return None
        return cls(connection)

    @property
    def ready(self) -> bool:
        """Whether the client keeps up, so that `write` need not wait."""
        return not self.flow.write_paused

    def write(self, data: bytes) -> None:
        """Sends one chunk. Nothing is sent for no data: a chunk of no bytes would end the body."""
        if data and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def drained(self) -> None:
        """Returns when the client has caught up."""
        await self.flow.drain()


def _too_many(limit: int) -> bytes:
    error = {
        "message": f"this server holds at most {limit} connections",
        "type": "overloaded_error",
        "param": None,
        "code": "too_many_connections",
    }
    body = json.dumps({"error": error}).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
