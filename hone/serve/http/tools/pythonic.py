"""[name(key=value, ...), ...]: calls as a list in Python's syntax, by Llama 3.2, Llama 4 and ToolACE."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from hone.serve.http.tools.parser import Nesting, TextOrCall, ToolCall, ToolParser

_START, _STOP = "<|python_start|>", "<|python_end|>"


class PythonicParser(ToolParser):
    """A reply that begins with "[" is a list of calls with literal arguments; any other is text."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._is_text = False
        self._nesting = Nesting("\"'")

    def _read(self, *, final: bool) -> list[TextOrCall]:
        if self._is_text:
            return [self._take(len(self._held))]
        rest = self._held.lstrip()
        if not rest or (_START.startswith(rest) and not final):
            return []
        rest = rest.removeprefix(_START).lstrip()
        if not rest:
            return []
        pieces: list[TextOrCall] = []
        if rest[0] == "[":
            length = self._nesting.end(rest)
            if length is None:
                return []
            after = rest[length:]
            if not final and len(after) < len(_STOP) and _STOP.startswith(after):
                return []
            pieces += self._parsed(rest[:length])
            if pieces:
                self._held = after.removeprefix(_STOP)
        self._is_text = True
        return [*pieces, self._take(len(self._held))]

    def _parsed(self, text: str) -> list[ToolCall]:
        try:
            tree = ast.parse(text, mode="eval").body
            values = [_call_of(one) for one in tree.elts] if isinstance(tree, ast.List) else []
            json.dumps([value for _, value in values], allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return []
        calls = self._calls_of([{"name": name, "arguments": value} for name, value in values])
        return calls or []


def _call_of(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """(name, arguments). Raises ValueError for anything but a call with named literals."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no named argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), arguments
