"""Messages between the processes of one server: pickles behind their lengths."""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct("!Q")
"""Bytes of the pickle that follows."""


def framed(message: Any) -> bytes:
    """`message` as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def read_message(file: BinaryIO) -> Any:
    """The next message; waits for it. Raises EOFError when the other side has ended, also where it was killed while it sent one."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = file.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)
