"""Calls that the request demands: the grammar makes the reply one tool's arguments, or a list of calls, whatever the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hone.base.errors import SpecError
from hone.serve.http.tools.parser import TextOrCall, ToolParser, loads


class NamedParser(ToolParser):
    """The whole reply is the arguments of the one tool that `tool_choice` names."""

    def _read(self, *, final: bool) -> list[TextOrCall]:
        if not final:
            return []
        value = loads(self._held)
        call = self._call(next(iter(self.tools)), value) if isinstance(value, dict) else None
        if call is None:  # cut off: it stays text
            return []
        self._held = ""
        return [call]


class RequiredParser(ToolParser):
    """The whole reply is a list of {name, parameters}, as `required_schema` demands."""

    def _read(self, *, final: bool) -> list[TextOrCall]:
        if not final:
            return []
        calls = self._calls_of(loads(self._held), ("parameters",))
        if calls is None:
            return []
        self._held = ""
        return [*calls]


def named_schema(parameters: Any) -> str:
    """The JSON schema of a named tool's arguments: an object, whatever the tool says."""
    return json.dumps({"type": "object", **parameters} if parameters else {"type": "object"})


def required_schema(tools: Mapping[str, Any], *, parallel: bool) -> str:
    """The JSON schema of a list of calls of `tools`, of one call unless `parallel`.

    Definitions that tools refer to are moved to the top, where their references look for them. Raises SpecError when
    two tools define one name differently.
    """
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for name, parameters in tools.items():
        own = dict(parameters or {})
        for index in ("$defs", "definitions"):
            definitions = own.pop(index, {})
            for key, value in definitions.items() if isinstance(definitions, dict) else ():
                if shared.setdefault(index, {}).setdefault(key, value) != value:
                    raise SpecError(
                        f"tools define {index}/{key} differently",
                        fix="give each definition of the tools a name of its own",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"type": "object", **own}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limits: dict[str, Any] = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return json.dumps({"type": "array", "items": {"anyOf": calls}, **limits, **shared})
