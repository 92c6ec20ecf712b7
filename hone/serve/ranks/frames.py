"""Messages between rank 0 and a worker: a kind, a length, bytes, over a socket pair. Never imports torch."""

from __future__ import annotations

import pickle
import socket
import struct
from enum import IntEnum
from typing import Any

_HEAD = struct.Struct("!BQ")


class MessageKind(IntEnum):
    """What a message is. Steps are packed (`hone.serve.ranks.packing`), everything else is pickled."""

    OPEN = 1
    """To the worker: what to build (`WorkerOrder`). Back: the pages that its memory holds."""
    PAGES = 2
    """To the worker: the number of pages of every rank's cache. Back: ready."""
    STEP = 3
    """To the worker: a step to run. Back, from the last pipeline stage: its results."""
    MASKS = 7
    """To the worker, while it runs a step: the masks of its sequences, an int32 array."""
    PREPARE = 4
    """To the worker: prepare one more CUDA graph, as rank 0 does now."""
    PLACE = 8
    """To the worker: the experts of all ranks' slots by layer, whose weights move now."""
    FAILED = 5
    """From the worker: the HoneError, or the text, with which it ends."""
    PING = 6
    """To the worker, on its second socket: reply with the number of steps begun and ended."""


class FrameSocket:
    """Whole messages over one connected socket, which this object owns."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, kind: MessageKind, data: Any) -> None:
        """Sends bytes-like `data`, or anything else pickled."""
        if not isinstance(data, bytes | bytearray | memoryview):
            data = pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
        head = _HEAD.pack(kind, len(data))
        if len(data) < 1 << 16:
            self.socket.sendall(head + data)
        else:
            self.socket.sendall(head)
            self.socket.sendall(data)

    def receive(self) -> tuple[MessageKind, bytearray]:
        """The next message. Raises EOFError when the other side has closed the socket or ended."""
        kind, length = _HEAD.unpack(self._exactly(_HEAD.size))
        return MessageKind(kind), self._exactly(length)

    def _exactly(self, length: int) -> bytearray:
        found = bytearray(length)
        view, done = memoryview(found), 0
        while done < length:
            try:
                count = self.socket.recv_into(view[done:])
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            done += count
        return found

    def close(self) -> None:
        self.socket.close()


def unpickled(data: bytes | bytearray) -> Any:
    """What `FrameSocket.send` pickled."""
    return pickle.loads(data)
