"""The form that a request demands of its output: response_format, structured_outputs, or the tools that it forces."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import ValidationError

from hone.base.errors import HoneError
from hone.model.tokenizer import Tokenizer
from hone.serve.http.protocol import ApiError, GenerationBody
from hone.serve.http.tools.forced import named_schema, required_schema
from hone.serve.structured.grammars import GrammarCheck
from hone.serve.structured.spec import StructuredOutputs

DEADLINE_S = 10.0
"""Longest compilation; the limits on size keep all known ones below a second."""


class OutputForms:
    """Reads and checks forms. A wrong schema is an error 400 that names its field, before the request is queued."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._check = GrammarCheck(tokenizer)

    async def of(self, body: GenerationBody, begin_after: tuple[int, ...] = ()) -> StructuredOutputs | None:
        """The form that `body` asks for, None for any text. Raises ApiError."""
        given = {"response_format": _response_format(body), "structured_outputs": _structured(body)}
        asked = [name for name, values in given.items() if values is not None]
        if len(asked) > 1:
            raise ApiError(400, "send response_format or structured_outputs, not both", param=asked[1])
        if not asked:
            return None
        values, field = given[asked[0]]  # type: ignore[misc]
        return await self._checked({**values, "begin_after": begin_after}, field)

    async def of_tools(
        self, tools: dict[str, Any], *, named: bool, parallel: bool, begin_after: tuple[int, ...] = ()
    ) -> StructuredOutputs:
        """The form of calls of `tools` that the request forces: arguments of the named one, or a list. Raises ApiError."""
        try:
            schema = named_schema(*tools.values()) if named else required_schema(tools, parallel=parallel)
        except HoneError as error:
            raise ApiError(400, error.what, param="tools") from None
        return await self._checked({"json_schema": schema, "begin_after": begin_after}, "tools")

    async def _checked(self, values: dict[str, Any], field: str) -> StructuredOutputs:
        if self._tokenizer is None:
            raise ApiError(400, f"{field} needs a tokenizer, which this model does not have", param=field)
        try:
            form = StructuredOutputs.model_validate(values)
        except ValidationError as error:
            said = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise ApiError(400, f"{field}: {said.removeprefix('Value error, ')}", param=field) from None
        except RecursionError:
            raise ApiError(400, f"{field} is nested too deeply", param=field) from None
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._check(form)), DEADLINE_S)
        except TimeoutError:
            raise ApiError(
                400, f"{field} was not compiled within {DEADLINE_S:.0f} s: simplify it", param=field
            ) from None
        except HoneError as error:
            raise ApiError(400, f"{field}: {error.what}", param=field, code="invalid_grammar") from None
        except (ValueError, RecursionError) as error:  # half of a surrogate pair, or a schema of a thousand levels
            raise ApiError(400, f"{field}: {error}", param=field, code="invalid_grammar") from None
        return form


def _response_format(body: GenerationBody) -> tuple[dict[str, Any], str] | None:
    """(Fields of the form, the name of the body's field that an error names)."""
    given = body.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"json_object": True}, "response_format"
    if given.json_schema is None:
        raise ApiError(
            400, "response_format of type json_schema needs json_schema", param="response_format.json_schema"
        )
    return {"json_schema": given.json_schema.schema_}, "response_format.json_schema.schema"


def _structured(body: GenerationBody) -> tuple[dict[str, Any], str] | None:
    given = body.structured_outputs
    if given is None:
        return None
    values = {
        "json_schema": given.json_,
        "json_object": bool(given.json_object),
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "whitespace_pattern": given.whitespace_pattern,
        "disable_any_whitespace": given.disable_any_whitespace,
    }
    named = [name for name in ("json", "regex", "choice", "grammar") if values[{"json": "json_schema"}.get(name, name)]]
    field = f"structured_outputs.{named[0]}" if len(named) == 1 else "structured_outputs"
    return {name: value for name, value in values.items() if value is not None}, field
