"""The layer between HTTP and the engine: reads and admits requests, and tracks each until its reply is sent."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.requests import Request as HttpRequest
from fastapi.responses import Response

from hone.serve.http.chat_forms import Parsers
from hone.serve.http.defaults import GenerationDefaults
from hone.serve.http.edge.guard import ChunkWriter
from hone.serve.http.endpoints.models import ServedModels
from hone.serve.http.metrics import ServerMetrics
from hone.serve.http.processes.board import FrontBoard, FrontReport, added, newest
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.replicas import Replicas
from hone.serve.http.processes.tallies import adopt, state_of
from hone.serve.http.processes.token_events import TokenEvents
from hone.serve.http.processes.wire import RefusedRequest
from hone.serve.http.prompts import Prompts
from hone.serve.http.protocol import AnyBody, ApiError, Body, GenerationBody, parse_body
from hone.serve.http.replies import PING, Reply, ReplyChoice, dump, error_events
from hone.serve.request import Output, Pooling, Request

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
    body_timeout_s: float = 60.0
    stall_s: float = 30.0
    metrics_prefix: str = ""
    pooling: Pooling = "last"
    parsers: Parsers = field(default_factory=Parsers)
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    adapters: Mapping[str, str] = field(default_factory=dict)
    allow_runtime_lora_updating: bool = False


class Front:
    """State shared by the routes: the engine's handle, the tokenizer, the limits, the metrics."""

    def __init__(
        self,
        engine: EngineLink | Replicas,
        prompts: Prompts,
        settings: FrontSettings,
        board: FrontBoard | None = None,
        index: int = 0,
    ) -> None:
        self.engine = engine
        self.board, self.index = board, index
        self.prompts = prompts
        self.settings = settings
        self.models = ServedModels(settings.names, settings.adapters)
        self.metrics = ServerMetrics(
            settings.names[0],
            self.figures,
            settings.metrics_prefix,
            lambda: [told.counted for told in self.tell()],
            self._each,
        )
        if board is not None:
            adopt(self.metrics.tallies, board.told(index).counted)  # those of the front that was here before
        self.draining = False
        self.started_at = int(time.time())
        self._serial = 0
        self._named: set[str] = set()
        self._reading: set[asyncio.Timeout] = set()

    # ---- requests in ------------------------------------------------------------------------------------------------

    async def read(self, request: HttpRequest, kind: type[AnyBody]) -> tuple[AnyBody, dict[str, str]]:
        """The checked body of `request` and the headers of its reply. Raises ApiError."""
        content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise ApiError(415, f"send the header 'Content-Type: application/json', not '{content_type[:80]}'")
        raw = await self._raw(request)
        # A large body is parsed in a thread, because the event loop must keep streaming to other clients.
        body = await asyncio.to_thread(parse_body, raw, kind) if len(raw) > _THREAD_BYTES else parse_body(raw, kind)
        self.models.check(getattr(body, "model", None))
        return body, self._warn(body)

    async def _raw(self, request: HttpRequest) -> bytes:
        limit, seconds = self.settings.max_body_bytes, self.settings.body_timeout_s
        parts, size = [], 0
        try:
            async with asyncio.timeout(0 if self.draining else seconds) as timeout:
                self._reading.add(timeout)
                try:
                    async for part in request.stream():
                        size += len(part)
                        if size > limit:
                            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
                        parts.append(part)
                finally:
                    self._reading.discard(timeout)
        except TimeoutError:
            if self.draining:
                raise self.shutting_down() from None
            raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout") from None
        return b"".join(parts)

    def drain(self) -> None:
        """From now on no request begins: new, half-sent and queued ones get 503 and Retry-After; running ones finish."""
        if self.draining:
            return
        self.draining = True
        for timeout in self._reading:
            timeout.reschedule(0)
        self.engine.hand_back("the server is shutting down")

    @staticmethod
    def shutting_down() -> ApiError:
        """The reply to a request that this server will not begin."""
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_s=5)

    def _warn(self, body: Body) -> dict[str, str]:
        # An empty header value ends the connection: an empty name is shown as a question mark.
        unknown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:40] or "?" for name in body.unknown[:10]]
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
        given = key.strip().encode("latin-1", "replace")  # the header's bytes: clients send UTF-8, some Latin-1
        wanted = {self.settings.api_key.encode(form, "xmlcharrefreplace") for form in ("utf8", "latin-1")}
        if scheme.lower() != "bearer" or not sum(hmac.compare_digest(given, one) for one in wanted):
            raise ApiError(401, "wrong or missing API key: send 'Authorization: Bearer KEY'", code="invalid_api_key")

    def request_id(self, request: HttpRequest, body: GenerationBody | None = None) -> str:
        """The client's x-request-id header or request_id field if it is one word, else a new one."""
        for given in (request.headers.get("x-request-id"), None if body is None else body.request_id):
            if given and _REQUEST_ID.fullmatch(given):
                return given
        return uuid.uuid4().hex

    def admit(self, count: int) -> None:
        """Raises ApiError 400 for more sequences than the queue holds, 503 with Retry-After when it is full."""
        capacity = self.engine.info.max_num_seqs + self.settings.max_queue
        if count > capacity:
            raise ApiError(400, f"{count} sequences in one request; this server holds at most {capacity}", param="n")
        if self.draining:
            raise self.shutting_down()
        outstanding = self.outstanding
        if outstanding + count > capacity:
            self.metrics.rejected("queue_full")
            raise ApiError(
                503,
                f"the queue is full: {outstanding} of {capacity} sequences are in progress",
                code="queue_full",
                retry_s=self.retry_s,
            )

    @property
    def outstanding(self) -> int:
        """Sequences in progress, those of the server's other fronts included."""
        return self.engine.outstanding if self.board is None else self.board.total()

    @property
    def retry_s(self) -> int:
        """Seconds after which a rejected client may retry: one second per round of running sequences."""
        return 1 + self.outstanding // max(self.engine.info.max_num_seqs, 1)

    def next_id(self, request_id: str = "beam") -> str:
        """An id for the engine that no other request has."""
        self._serial += 1
        return f"{self.index}.{self._serial}-{request_id}"

    def job(self, body: GenerationBody, reply: Reply, request_id: str, prompts: list[Request]) -> ReplyJob:
        """Submits `prompts` (one per choice of `reply`, without ids) to the engine."""
        for request in prompts:
            request.id = self.next_id(request_id)
        job = ReplyJob(self, reply, prompts)
        self.metrics.choices.observe(body.n or 1)
        self.metrics.max_tokens.observe(prompts[0].params.max_tokens)
        self.engine.submit(prompts, job.deliver, job.streams if body.stream else ())
        return job

    # ---- state out --------------------------------------------------------------------------------------------------

    def tell(self) -> list[FrontReport]:
        """What every front of the server told the others, this one just now.

        Whoever shows what it counted tells it first, so that no front shows less than another did before: to Prometheus
        a counter that falls has begun anew.
        """
        told = FrontReport(state_of(self.metrics.settle()), self.engine.heard)
        if self.board is None:
            return [told]
        self.board.tell(self.index, told)
        return [self.board.told(front) for front in range(self.board.fronts)]

    def figures(self) -> dict[str, float]:
        """The newest figures of the engines, summed, and of this object, for /metrics."""
        heard = newest(told.heard for told in self.tell())
        return {
            **added(heard),
            "requests_outstanding": self.outstanding,
            "steps": sum(one.steps for one in heard),
            "last_step_age_seconds": self.engine.last_progress_s,
        }

    def _each(self) -> list[dict[str, float]]:
        """The figures of each replica, where there are several."""
        if self.board is None or self.board.replicas == 1:
            return []
        heard = newest(told.heard for told in self.tell())
        return [{**one.stats, "requests_outstanding": self.board.outstanding(place)} for place, one in enumerate(heard)]


class ReplyJob:
    """One client request in progress: its choices, the engine's outputs for them, its times."""

    def __init__(self, front: Front, reply: Reply, requests: list[Request]) -> None:
        self._front = front
        self.reply, self._adapter = reply, requests[0].adapter
        self._choices = {request.id: choice for request, choice in zip(requests, reply.choices, strict=True)}
        self._open = set(self._choices)
        self.waits: deque[Output | RefusedRequest] = deque()
        """Outputs that this job's task has not taken yet."""
        self._wake = asyncio.Event()
        self.writer: ChunkWriter | None = None
        self._broken: Exception | None = None
        self._started = time.monotonic()
        self._timer: asyncio.TimerHandle
        self.gaps = front.metrics.gaps
        self.streams = [TokenEvents(self, choice) for choice in reply.choices]

    def deliver(self, item: Output | RefusedRequest) -> None:
        """Called by the engine's handle on the event loop."""
        if isinstance(item, Output) and item.finish is None and self.writes_at_once:
            self._write(item)
            return
        self.waits.append(item)
        self._wake.set()

    @property
    def writes_at_once(self) -> bool:
        """Whether events may go to the client now, and no earlier one waits."""
        writer = self.writer
        return writer is not None and not self.waits and self._broken is None and writer.ready

    def write(self, data: bytes) -> None:
        """Sends `data` to the client, if the stream still runs."""
        if len(self.gaps) > 1000:
            self._front.metrics.settle()
        if self.writer is not None:
            self.writer.write(data)

    def _write(self, output: Output) -> None:
        """Sends the events of an output at once, without waking this job's task, which costs more than the rest."""
        try:
            choice = self._choices[output.request_id]
            self._measure(output, choice)
            choice.take(output)
            data = self.reply.events(choice, output)
            if data and self.writer is not None:
                self.writer.write(data)
        except Exception as error:  # raised in the job's own task: this is the task of all requests
            self._broken = error
            self._wake.set()

    async def whole(self) -> bytes:
        """Waits for all choices; returns the response object as JSON. Raises ApiError if one of them fails."""
        while self._open:
            await self._wake.wait()
            for _ in self._take():
                pass
        if self.reply.num_logprobs > _THREAD_LOGPROBS:
            return await asyncio.to_thread(lambda: dump(self.reply.whole()))
        return dump(self.reply.whole())

    async def events(self, send: Callable[[bytes], Awaitable[None]], writer: ChunkWriter | None = None) -> None:
        """Sends every event when it arrives, by `writer` at once or by `send`, then [DONE]; an error becomes an event."""
        self.writer = writer
        self._ping_later()
        parts: list[bytes] = []
        try:
            while self._open:
                await self._wake.wait()
                if self._broken is not None:
                    raise self._broken
                idle = not self.waits
                parts.clear()
                for choice, output in self._take():
                    parts.append(self.reply.events(choice, output))
                data = PING if idle else b"".join(parts)
                if data:
                    await send(data)
            parts = [self.reply.closing()]
        except ApiError as error:
            parts.append(error_events(error))
        finally:
            self.writer = None
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

    def _take(self) -> Iterator[tuple[ReplyChoice, Output]]:
        """Yields the outputs delivered since the last call, each after it is added to its choice.

        Raises ApiError for a failed choice.
        """
        self._wake.clear()
        while self.waits:
            item = self.waits.popleft()
            if isinstance(item, RefusedRequest):
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

    def _measure(self, output: Output, choice: ReplyChoice) -> None:
        metrics, now = self._front.metrics, time.monotonic()
        if output.tokens:
            self.count(choice, now, len(output.tokens))
        if output.finish is None:
            return
        count = len(choice.tokens) + len(output.tokens)
        metrics.finished(output.finish)
        metrics.adapted(self._adapter, count)
        metrics.latency_s.observe(now - self._started)
        metrics.prompt_size.observe(len(choice.prompt.ids))
        metrics.prompt_tokens.inc(len(choice.prompt.ids))
        metrics.cached_tokens.inc(output.num_cached_tokens)
        metrics.output_size.observe(count)
        if count > 1:
            metrics.per_token_s.observe((now - choice.first_s) / (count - 1))

    def count(self, choice: ReplyChoice, now: float, tokens: int = 1) -> None:
        """Counts an output of `choice` with so many tokens."""
        metrics = self._front.metrics
        metrics.generated_tokens.inc(tokens)
        if choice.last_s:
            metrics.between_tokens_s.observe(now - choice.last_s)
        else:
            metrics.first_token_s.observe(now - self._started)
            choice.first_s = now
        choice.last_s = now


class EventStream(Response):
    """A server-sent-event reply that ends its job when the client disconnects."""

    def __init__(self, job: ReplyJob, headers: dict[str, str]) -> None:
        super().__init__(
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writer = ChunkWriter.of(scope)

        async def part(data: bytes) -> None:
            if writer is None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            else:
                writer.write(data)
                if not writer.ready:
                    await writer.drained()

        async def work() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._job.events(part, writer)
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
