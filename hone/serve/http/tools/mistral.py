"""[TOOL_CALLS][{"name": ..., "arguments": {...}}] or [TOOL_CALLS]name{...}, also name[ARGS]{...}: Mistral's models."""

from __future__ import annotations

import re

from hone.serve.http.tools.parser import MarkedParser, Nesting, ToolCall, loads

_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*(\[ARGS\])?\s*")
_BEGUN = re.compile(r"\s*([A-Za-z0-9_.-]{1,128}\s*(\[(A(R(G(S(\]\s*)?)?)?)?)?)?)?")


class MistralParser(MarkedParser):
    """Calls after a special token: a list of objects in older tokenizers, a name and an object in newer ones."""

    marker = "[TOOL_CALLS]"
    keeps_special_tokens = True

    def _begin(self) -> None:
        self._nesting = Nesting()

    def _body(self, text: str, *, final: bool) -> tuple[int, list[ToolCall]] | None:
        begin = len(text) - len(text.lstrip())
        if begin == len(text):
            return None
        if text[begin] in "[{":
            length = self._nesting.end(text[begin:])
            if length is None:
                return None
            return begin + length, self._calls_of(loads(text[begin : begin + length])) or []
        named = _NAME.match(text)
        if named is None or not text[named.end() :].startswith("{"):
            return None if _BEGUN.fullmatch(text) and not final else (0, [])
        length = self._nesting.end(text[named.end() :])
        if length is None:
            return None
        end = named.end() + length
        value = loads(text[named.end() : end])
        call = self._call(named[1], value) if isinstance(value, dict) else None
        return end, [call] if call else []
