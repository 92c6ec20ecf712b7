"""Events of ordinary tokens, from bytes that are made once a stream: what a stream's every further token costs."""

from __future__ import annotations

from collections import deque
from json.encoder import encode_basestring  # type: ignore[attr-defined]  # not in typeshed; C where there is one
from typing import Any, Protocol

from hone.serve.http.edge.guard import ChunkWriter
from hone.serve.http.processes.wire import RefusedRequest
from hone.serve.http.replies import Reply, ReplyChoice
from hone.serve.request import Output


class StreamedJob(Protocol):
    """What token events need of the client's request they belong to."""

    reply: Reply
    writer: ChunkWriter | None
    waits: deque[Output | RefusedRequest]
    gaps: dict[tuple[float, float], int]

    @property
    def writes_at_once(self) -> bool: ...
    def write(self, data: bytes) -> None: ...


class TokenEvents:
    """The events of one choice in a stream: `take` makes them, `flush` sends all that were made in one write.

    `take` refuses, so that the token goes the long way, as long as the stream has not begun, its client is behind, or
    earlier outputs wait; and for replies whose events are not the same around every text.
    """

    __slots__ = ("_after", "_before", "_between", "_choice", "_flow", "_job", "_parts", "_tokens_shown")

    def __init__(self, job: StreamedJob, choice: ReplyChoice) -> None:
        self._job = job
        self._choice = choice
        self._flow: Any = None  # the client's connection; None until the stream may go this way
        self._before, self._between, self._after, self._tokens_shown = "", "", "", False
        self._parts: list[str] = []

    def take(self, token: int, text: str, now: float) -> bool:
        """Whether the event of `token` is kept for `flush`."""
        job, choice, flow = self._job, self._choice, self._flow
        if flow is None:
            if not self._opened():
                return False
        elif job.waits or flow.write_paused:
            return False
        choice.text.append(text)
        choice.tokens.append(token)
        gaps, gap = job.gaps, (choice.last_s, now)
        gaps[gap] = gaps.get(gap, 0) + 1
        choice.last_s = now
        if self._tokens_shown:
            event = f"{self._before}{encode_basestring(text)}{self._between}{token}{self._after}"
        elif text:
            event = f"{self._before}{encode_basestring(text)}{self._between}"
        else:
            return True  # a part of a character: nothing to show yet
        self._parts.append(event)
        return True

    def _opened(self) -> bool:
        """Whether this stream has begun, and has events of the same bytes around every text."""
        job, choice = self._job, self._choice
        if not (choice.begun and choice.last_s and job.writes_at_once):
            return False
        around = job.reply.around(choice)
        if around is None or job.writer is None:
            return False
        self._before, self._between, self._after = (part.decode() for part in around)
        self._tokens_shown = bool(self._after)
        self._flow = job.writer.flow
        return True

    def flush(self) -> None:
        """Sends what is kept."""
        parts = self._parts
        if parts:
            self._job.write((parts[0] if len(parts) == 1 else "".join(parts)).encode("utf8", "replace"))
            parts.clear()
