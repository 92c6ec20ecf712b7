"""Journal: every paid answer on disk before it is used, so that no question is asked twice."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """A model's answer, or why it refused; with the tokens it was charged for."""

    text: str
    refused: str
    tokens_in: int
    tokens_out: int


def key_of(request: dict[str, Any]) -> str:
    """The identity of a request: what is sent, without the address and the key of the endpoint."""
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).hexdigest()


class Journal:
    """Answers by request, appended to a file of JSON lines and synced; memory holds only where each is.

    A last line that a kill cut off is removed. Used by several threads.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._places: dict[str, int] = {}
        self.tokens_in = self.tokens_out = self.loaded = 0
        self._lock = threading.Lock()
        self._file = open(path, "a+b")
        self._file.seek(0)
        place = 0
        for line in self._file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is None:
                break
            self._places[row["key"]] = place
            self.tokens_in += row["tokens_in"]
            self.tokens_out += row["tokens_out"]
            place += len(line)
        self._file.truncate(place)
        self.loaded = len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> Answer:
        with self._lock:
            self._file.seek(self._places[key])
            row = json.loads(self._file.readline())
        return Answer(row["text"], row["refused"], row["tokens_in"], row["tokens_out"])

    def add(self, key: str, answer: Answer) -> None:
        """Writes an answer; it is on disk when this returns."""
        line = json.dumps({"key": key, **answer._asdict()}, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._places[key] = place
            self.tokens_in += answer.tokens_in
            self.tokens_out += answer.tokens_out

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
