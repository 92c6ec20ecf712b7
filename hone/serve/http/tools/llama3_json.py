"""{"name": ..., "parameters": {...}}, several with ";" between them: Llama 3.1 and 3.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.serve.http.tools.parser import Nesting, TextOrCall, ToolParser, loads

_TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """A reply that begins with an object (or with the special token before it) is calls; any other is text."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._is_text = False
        self._nesting: Nesting | None = None

    def _read(self, *, final: bool) -> list[TextOrCall]:
        pieces: list[TextOrCall] = []
        while self._held and not self._is_text:
            rest = self._held.lstrip()
            if self._num_calls:
                rest = rest.lstrip("; \t\r\n,")
            if not rest or (_TAG.startswith(rest) and not final):
                return pieces
            rest = rest.removeprefix(_TAG).lstrip()
            if not rest:
                return pieces
            if rest[0] not in "{[":
                break
            self._nesting = self._nesting or Nesting()
            length = self._nesting.end(rest)
            if length is None:
                return pieces
            calls = self._calls_of(loads(rest[:length]), ("parameters", "arguments"))
            if calls is None:
                break
            self._nesting = None
            self._take(len(self._held) - len(rest) + length)
            pieces += calls
        self._is_text = self._is_text or bool(self._held)
        return [*pieces, self._take(len(self._held))]
