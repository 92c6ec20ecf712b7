"""Messages between the engine's process and the front: framed pickles, with a step's ordinary tokens in columns."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from hone.serve.http.processes.messages import LENGTH, framed, read_message
from hone.serve.request import Output

_values_of = attrgetter(*(field.name for field in fields(Output)))

OutputColumns = tuple[list[str], list[int], list[str]]
"""Request ids, tokens and texts of outputs that have nothing else: one token each, and not the first of a request."""


@dataclass(frozen=True)
class EngineInfo:
    """What is known of the engine that the HTTP process needs before it accepts requests."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""
    block_size: int = 16
    """Tokens in a page of the KV cache."""
    num_pages: int = 2**16
    """Pages of the KV cache."""
    sizes: str = ""
    """The engine's sizes in one line, to be printed once."""


@dataclass
class RefusedRequest:
    """A request rejected by the engine: invalid (`status` 400), queue full (503), internal error (500)."""

    request_id: str
    message: str
    status: int


def pack(outputs: list[Output]) -> tuple[OutputColumns, list[tuple[Any, ...]]]:
    """`outputs` as columns of the ordinary ones, and tuples of the others: both pickle faster than objects.

    Where a request has several outputs, they keep their order: after one that is not ordinary none is.
    """
    names: list[str] = []
    tokens: list[int] = []
    texts: list[str] = []
    others: list[tuple[Any, ...]] = []
    behind: set[str] = set()
    for output in outputs:
        if (
            output.finish is None
            and not output.logprobs
            and len(output.tokens) == 1
            and output.num_output_tokens > 1
            and output.prompt_logprobs is None
            and output.pooled is None
            and output.request_id not in behind
        ):
            names.append(output.request_id)
            tokens.append(output.tokens[0])
            texts.append(output.text)
        else:
            behind.add(output.request_id)
            others.append(_values_of(output))
    return (names, tokens, texts), others


def unpack(columns: OutputColumns, others: list[tuple[Any, ...]]) -> list[Output]:
    """The inverse of `pack`, ordinary outputs first; of them the counts of tokens are 0."""
    plain = [Output(name, [token], text) for name, token, text in zip(*columns, strict=True)]
    return plain + [Output(*values) for values in others]


class Channel:
    """The engine's side of a socket: blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = sock.makefile("rb")

    def send(self, message: Any) -> None:
        self._socket.sendall(framed(message))

    def receive(self) -> Any:
        """The next message. Raises EOFError when the other side has closed the socket, or was killed while it sent one."""
        return read_message(self._file)


class QueuedChannel(Channel):
    """A channel whose `send` never waits: a front that hangs must not stop the engine, nor one that ended."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def _deliver(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                super().send(self._queue.get())


class FrameProtocol(asyncio.Protocol):
    """The front's side: `take` is called with every message, `flush` once after all that had arrived, `lost` at the end.

    A front that is behind thus finds several steps at once, and sends each stream their tokens together.
    """

    def __init__(self, take: Callable[[Any], None], flush: Callable[[], None], lost: Callable[[], None]) -> None:
        self._take, self._flush, self._lost = take, flush, lost
        self._buffer = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer, start, head = self._buffer, 0, LENGTH.size
        buffer += data
        while len(buffer) - start >= head:
            end = start + head + LENGTH.unpack_from(buffer, start)[0]
            if end > len(buffer):
                break
            self._take(pickle.loads(memoryview(buffer)[start + head : end]))
            start = end
        del buffer[:start]
        if start:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def send(self, message: Any) -> None:
        """Sends `message`; nothing once the connection is lost."""
        if not self._transport.is_closing():
            self._transport.write(framed(message))

    def close(self) -> None:
        self._transport.close()
