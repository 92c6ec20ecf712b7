"""What all parsers of tool calls share: pieces of a reply, the end of a growing JSON value, and markers in a growing text.

A parser reads a text that grows by any amounts and gives text for the user and whole calls. It never gives a part of a
call: a call that is malformed, unknown or cut off stays text, and the arguments of one that is given are a JSON object.
So the pieces depend on the text alone, not on how it was cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

MOST_CALLS = 256
"""Calls of one reply; what follows them is text."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: `arguments` is a JSON object as text."""

    name: str
    arguments: str


TextOrCall = str | ToolCall


class ToolParser:
    """Base of the parsers. `tools` has the JSON schema of the parameters of every tool that the request names."""

    keeps_special_tokens: ClassVar[bool] = False
    """Whether calls are marked by special tokens, which the text must then have."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self.tools = tools
        self._held = ""
        self._num_calls = 0

    def push(self, text: str) -> list[TextOrCall]:
        """The pieces that are certain now that `text` has come."""
        self._held += text
        return self._joined(self._read(final=False))

    def finish(self) -> list[TextOrCall]:
        """The rest, at the end of the reply: a call that is not complete is text."""
        pieces = self._joined(self._read(final=True))
        rest, self._held = self._held, ""
        return self._joined([*pieces, rest])

    def _read(self, *, final: bool) -> list[TextOrCall]:
        """Takes what is certain from the front of `self._held`; what it leaves there at the end is text."""
        raise NotImplementedError

    def _take(self, count: int) -> str:
        """Removes and returns the first `count` characters that are held."""
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    @staticmethod
    def _joined(pieces: list[TextOrCall]) -> list[TextOrCall]:
        """Without empty texts, neighbouring texts joined."""
        found: list[TextOrCall] = []
        for piece in pieces:
            if isinstance(piece, str) and found and isinstance(found[-1], str):
                found[-1] += piece
            elif piece:
                found.append(piece)
        return found

    def _call(self, name: Any, arguments: Any) -> ToolCall | None:
        """The call, None for a tool that the request does not have or for arguments that are no object."""
        if isinstance(arguments, str):  # some models write the object as a text
            arguments = loads(arguments)
        if arguments is None:
            arguments = {}
        known = isinstance(name, str) and name in self.tools and isinstance(arguments, dict)
        if not known or self._num_calls >= MOST_CALLS:
            return None
        self._num_calls += 1
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _calls_of(self, value: Any, names: tuple[str, ...] = ("arguments", "parameters")) -> list[ToolCall] | None:
        """The calls of a JSON value, one object or a list of them; None when it holds anything else."""
        before, found = self._num_calls, []
        for one in value if isinstance(value, list) else [value]:
            given = one if isinstance(one, dict) else {}
            key = next((key for key in names if key in given), None)
            call = self._call(given.get("name"), given[key] if key else {}) if key or len(given) == 1 else None
            if call is None:
                self._num_calls = before
                return None
            found.append(call)
        return found or None


def loads(text: str) -> Any:
    """The JSON value of a text, None when it is none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and infinity are no JSON


class Nesting:
    """Finds where a value in brackets ends in a growing text. It reads every character once."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._found: int | None = None

    def end(self, text: str) -> int | None:
        """The length of the value at the beginning of `text`, None while it is open. Each call's text begins with the last's."""
        if self._found is not None:
            return self._found
        for index in range(self._at, len(text)):
            letter = text[index]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                if letter == "\\":
                    self._escaped = True
                elif letter == self._quote:
                    self._quote = ""
            elif letter in self._quotes:
                self._quote = letter
            elif letter in "{[(":
                self._depth += 1
            elif letter in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    self._found = index + 1
                    return self._found
        self._at = len(text)
        return None


def open_end(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, shorter than all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class MarkedParser(ToolParser):
    """Base of the parsers whose calls follow a marker: text up to it is text, and `_body` reads what follows."""

    marker: ClassVar[str]

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._inside = False

    def _read(self, *, final: bool) -> list[TextOrCall]:
        pieces: list[TextOrCall] = []
        while self._held:
            if not self._inside:
                index = self._held.find(self.marker)
                if index < 0:
                    keep = 0 if final else open_end(self._held, self.marker)
                    pieces.append(self._take(len(self._held) - keep))
                    break
                pieces.append(self._take(index))
                self._inside = True
                self._begin()
            read = self._body(self._held[len(self.marker) :], final=final)
            if read is None:
                break
            count, calls = read
            raw = self._take(len(self.marker) + count)
            pieces += calls or [raw]
            self._inside = False
        return pieces

    def _begin(self) -> None:
        """Called when a marker was found, before `_body`."""

    def _body(self, text: str, *, final: bool) -> tuple[int, list[ToolCall]] | None:
        """(Characters of what follows the marker, its calls or none when it is text); None while more is to come."""
        raise NotImplementedError
