"""<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>: Qwen3-Coder."""

from __future__ import annotations

import re
from typing import Any

from hone.serve.http.tools.parser import MarkedParser, ToolCall, loads

_END = "</tool_call>"
_FUNCTION_END, _VALUE_END = "</function>", "</parameter>"
_FUNCTION = re.compile(r"<function=([^>\n]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,200})>\n?")
_NEXT = re.compile(r"\s*(?:<parameter=|\Z)")


class Qwen3CoderParser(MarkedParser):
    """Calls in marks like XML's, without escapes: values are texts, converted as the tool's schema says."""

    marker = "<tool_call>"

    def _begin(self) -> None:
        self._from = 0

    def _body(self, text: str, *, final: bool) -> tuple[int, list[ToolCall]] | None:
        end = text.find(_END, self._from)
        if end < 0:
            self._from = max(0, len(text) - len(_END))
            return None
        call = self._parsed(text[:end])
        return end + len(_END), [call] if call else []

    def _parsed(self, body: str) -> ToolCall | None:
        body = body.strip()
        function = _FUNCTION.match(body)
        if function is None or not body.endswith(_FUNCTION_END):
            return None
        name, rest = function[1].strip(), body[function.end() : -len(_FUNCTION_END)]
        schema = self.tools.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        arguments: dict[str, Any] = {}
        at = 0
        while found := _PARAMETER.match(rest, at):
            key, end = found[1].strip(), rest.find(_VALUE_END, found.end())
            while end >= 0 and not _NEXT.match(rest, end + len(_VALUE_END)):
                end = rest.find(_VALUE_END, end + 1)  # this one is in the value
            if end < 0:
                return None
            kind = properties.get(key) if isinstance(properties, dict) else None
            arguments[key] = _typed(rest[found.end() : end].removesuffix("\n"), kind)
            at = end + len(_VALUE_END)
        return self._call(name, arguments) if not rest[at:].strip() else None


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter: the text where the schema allows one, else what it is in JSON or Python."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds or (kind is None and not (isinstance(schema, dict) and "anyOf" in schema)):
        return None if text.strip() == "null" and "null" in kinds else text
    word = {"true": True, "false": False, "none": None, "null": None}
    stripped = text.strip()
    if stripped.lower() in word:
        return word[stripped.lower()]
    value = loads(stripped)
    return text if value is None else value
