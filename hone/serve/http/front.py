"""The layer between HTTP and the engine: reads and admits requests, and tracks each until its reply is sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response

from hone.serve.http.metrics import ServerMetrics
from hone.serve.http.prompts import Prompts
from hone.serve.http.protocol import AnyBody, ApiError, Body, GenerationBody, bounded, parse_body
from hone.serve.http.replies import PING, Choice, Reply, dump, error_events
from hone.serve.http.worker import EngineProcess, Refused
from hone.serve.request import Output, Request

log = logging.getLogger("hone.serve")
_PING_S = 15.0
_THREAD_BYTES = 2**18
_THREAD_LOGPROBS = 2000
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True)
class FrontSettings:
    """The fields of a `ServerSpec` that the HTTP side uses."""

    names: tuple[str, ...]
    api_key: str = ""
    max_queue: int = 1024
    max_body_bytes: int = 16 * 2**20
    stall_s: float = 30.0
    metrics_prefix: str = ""


class Front:
    """State shared by the routes: the engine's handle, the tokenizer, the limits, the metrics."""

    def __init__(self, engine: EngineProcess, prompts: Prompts, settings: FrontSettings) -> None:
        self.engine = engine
        self.prompts = prompts
        self.settings = settings
        self.metrics = ServerMetrics(settings.names[0], self.figures, settings.metrics_prefix)
        self.draining = False
        self.started_at = int(time.time())
        self._serial = 0
        self._named: set[str] = set()

    # ---- requests in ------------------------------------------------------------------------------------------------

    async def read(self, request: HttpRequest, kind: type[AnyBody]) -> tuple[AnyBody, dict[str, str]]:
        """The checked body of `request` and the headers of its reply. Raises ApiError."""
        content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError(415, f"send the header 'Content-Type: application/json', not '{content_type[:80]}'")
        raw = await self._raw(request)
        # A large body is parsed in a thread, because the event loop must keep streaming to other clients.
        body = await asyncio.to_thread(parse_body, raw, kind) if len(raw) > _THREAD_BYTES else parse_body(raw, kind)
        model = getattr(body, "model", None)
        if model is not None and model not in self.settings.names:
            raise ApiError(
                404,
                f"no model '{bounded(model, 100)}'; this server has: {', '.join(self.settings.names)}",
                param="model",
                code="model_not_found",
            )
        return body, self._warn(body)

    async def _raw(self, request: HttpRequest) -> bytes:
        limit = self.settings.max_body_bytes
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
            parts.append(part)
        return b"".join(parts)

    def _warn(self, body: Body) -> dict[str, str]:
        unknown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:40] for name in body.unknown[:10]]
        if not unknown:
            return {}
        for name in unknown:
            if name not in self._named and len(self._named) < 1000:
                self._named.add(name)
                log.warning("unknown field '%s' in a request is ignored (said once)", name)
        return {"x-hone-ignored-fields": ", ".join(unknown)}

    def authorize(self, request: HttpRequest) -> None:
        """Raises ApiError 401 unless the request carries the API key (when one is set)."""
        if not self.settings.api_key:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        wanted = self.settings.api_key.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("utf8", "replace"), wanted):
            raise ApiError(401, "wrong or missing API key: send 'Authorization: Bearer KEY'", code="invalid_api_key")

    def request_id(self, request: HttpRequest, body: GenerationBody | None = None) -> str:
        """The client's x-request-id header or request_id field if it is one word, else a new one."""
        for given in (request.headers.get("x-request-id"), None if body is None else body.request_id):
            if given and _REQUEST_ID.fullmatch(given):
                return given
        return uuid.uuid4().hex

    def admit(self, count: int) -> None:
        """Raises ApiError 400 for more sequences than the queue holds, 503 with Retry-After when it is full."""
        capacity = self.engine.facts.max_num_seqs + self.settings.max_queue
        if count > capacity:
            raise ApiError(400, f"{count} sequences in one request; this server holds at most {capacity}", param="n")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_s=5)
        if self.engine.outstanding + count > capacity:
            self.metrics.rejected("queue_full")
            raise ApiError(
                503,
                f"the queue is full: {self.engine.outstanding} of {capacity} sequences are in progress",
                code="queue_full",
                retry_s=self.retry_s,
            )

    @property
    def retry_s(self) -> int:
        """Seconds after which a rejected client may retry: one second per round of running sequences."""
        return 1 + self.engine.outstanding // max(self.engine.facts.max_num_seqs, 1)

    def job(self, body: GenerationBody, reply: Reply, request_id: str, prompts: list[Request]) -> Job:
        """Submits `prompts` (one per choice of `reply`, without ids) to the engine."""
        for request in prompts:
            self._serial += 1
            request.id = f"{self._serial}-{request_id}"
        job = Job(self, reply, prompts)
        self.metrics.choices.observe(body.n or 1)
        self.metrics.max_tokens.observe(prompts[0].params.max_tokens)
        self.engine.submit(prompts, job.deliver)
        return job

    # ---- state out --------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """The latest figures of the engine and of this object, for /metrics."""
        return {
            **self.engine.stats,
            "requests_outstanding": self.engine.outstanding,
            "steps": self.engine.steps,
            "last_step_age_seconds": self.engine.last_progress_s,
        }


class Job:
    """One client request in progress: its choices, the engine's outputs for them, its times."""

    def __init__(self, front: Front, reply: Reply, requests: list[Request]) -> None:
        self._front = front
        self._reply = reply
        self._choices = {request.id: choice for request, choice in zip(requests, reply.choices, strict=True)}
        self._open = set(self._choices)
        self._items: deque[Output | Refused] = deque()
        self._wake = asyncio.Event()
        self._started = time.monotonic()
        self._timer: asyncio.TimerHandle
        self._seen: dict[str, tuple[float, float]] = {}  # request id to the times of its first and its latest output

    def deliver(self, item: Output | Refused) -> None:
        """Called by the engine's handle on the event loop."""
        self._items.append(item)
        self._wake.set()

    async def whole(self) -> bytes:
        """Waits for all choices; returns the response object as JSON. Raises ApiError if one of them fails."""
        while self._open:
            await self._wake.wait()
            for _ in self._take():
                pass
        if self._reply.num_logprobs > _THREAD_LOGPROBS:
            return await asyncio.to_thread(lambda: dump(self._reply.whole()))
        return dump(self._reply.whole())

    async def events(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Yields every event when it arrives, then [DONE]; an error becomes an event."""
        self._ping_later()
        parts: list[bytes] = []
        try:
            while self._open:
                await self._wake.wait()
                idle = not self._items
                parts.clear()
                for choice, output in self._take():
                    parts.append(self._reply.events(choice, output))
                data = PING if idle else b"".join(parts)
                if data:
                    await send(data)
            parts = [self._reply.closing()]
        except ApiError as error:
            parts.append(error_events(error))
        finally:
            self._timer.cancel()
        await send(b"".join(parts))

    def _ping_later(self) -> None:
        # Periodic comments keep proxies from closing a stream whose request waits in the queue.
        def ping() -> None:
            self._wake.set()
            self._ping_later()

        self._timer = asyncio.get_running_loop().call_later(_PING_S, ping)

    def close(self) -> None:
        """Aborts unfinished choices: the client disconnected, or another choice failed."""
        if self._open:
            self._front.engine.abort(self._open)
            for _ in self._open:
                self._front.metrics.finished("abort")
            self._open.clear()

    def _take(self) -> Iterator[tuple[Choice, Output]]:
        """Yields the outputs delivered since the last call, each after it is added to its choice.

        Raises ApiError for a failed choice.
        """
        self._wake.clear()
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Refused):
                self._open.discard(item.request_id)
                if item.status == 503:
                    self._front.metrics.rejected("queue_full")
                    raise ApiError(503, item.message, code="queue_full", retry_s=self._front.retry_s)
                raise ApiError(item.status, item.message, code="refused" if item.status == 400 else None)
            if item.finish == "error":
                self._open.discard(item.request_id)
                self._front.metrics.finished("error")
                raise ApiError(500, item.error or "the engine failed on this request", code="engine_error")
            choice = self._choices[item.request_id]
            self._measure(item, choice)
            choice.take(item)
            if item.finish is not None:
                self._open.discard(item.request_id)
            yield choice, item

    def _measure(self, output: Output, choice: Choice) -> None:
        metrics, now = self._front.metrics, time.monotonic()
        if output.tokens:
            metrics.generated_tokens.inc(len(output.tokens))
            if output.request_id not in self._seen:
                metrics.first_token_s.observe(now - self._started)
                self._seen[output.request_id] = (now, now)
            else:
                first, last = self._seen[output.request_id]
                metrics.between_tokens_s.observe(now - last)
                self._seen[output.request_id] = (first, now)
        if output.finish is None:
            return
        count = len(choice.tokens) + len(output.tokens)
        metrics.finished(output.finish)
        metrics.latency_s.observe(now - self._started)
        metrics.prompt_size.observe(len(choice.prompt.ids))
        metrics.prompt_tokens.inc(len(choice.prompt.ids))
        metrics.cached_tokens.inc(output.num_cached_tokens)
        metrics.output_size.observe(count)
        if count > 1:
            metrics.per_token_s.observe((now - self._seen[output.request_id][0]) / (count - 1))


class EventStream(Response):
    """A server-sent-event reply that ends its job when the client disconnects."""

    def __init__(self, job: Job, headers: dict[str, str]) -> None:
        super().__init__(
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def part(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def work() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._job.events(part)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await until_disconnect(work(), receive)
        finally:
            self._job.close()


async def until_disconnect(work: Any, receive: Callable[[], Awaitable[Any]]) -> Any:
    """The result of coroutine `work`, or None when the client disconnects first (then `work` is cancelled)."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


def json_reply(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """`value` as a JSON response."""
    return Response(dump(value), status, headers, "application/json")
