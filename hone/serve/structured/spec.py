"""What a request's output must match: a JSON schema, a regular expression, one of several texts, or a grammar."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, field_validator, model_validator

from hone.base.spec import Spec

MOST_CHARS = 256 * 1024
"""Characters of a schema, or of all choices."""

MOST_GRAMMAR_CHARS = 32 * 1024
"""Characters of an expression or grammar, whose compilation and masks can take time that grows with the square."""

MOST_CHOICES = 4096

_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
_WHITESPACE = r"[ \t\n\r]{0,40}"
"""Between JSON tokens. Bounded: a model that prefers blanks would otherwise fill its output with them."""


class StructuredOutputs(Spec):
    """The form of one request's output; exactly one of the first five fields is given. Names are vLLM's."""

    json_schema: str | None = Field(None, description="JSON schema of the output (vLLM: json), as a text or a mapping.")
    json_object: bool = Field(False, description="The output is any JSON object.")
    regex: str | None = Field(
        None, description="Regular expression that the whole output matches; \\d, \\w and \\s are ASCII's."
    )
    choice: tuple[str, ...] = Field((), description="The output is one of these texts.")
    grammar: str | None = Field(None, description="Context-free grammar in Lark's form or in GBNF.")
    whitespace_pattern: str | None = Field(
        None, max_length=200, description="Regular expression of the blanks between JSON tokens; empty is 40 at most."
    )
    disable_any_whitespace: bool = Field(False, description="No blanks between JSON tokens.")
    begin_after: tuple[int, ...] = Field(
        (), max_length=64, description="Tokens that end an unconstrained beginning, such as a model's reasoning."
    )

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_text(cls, schema: Any) -> Any:
        if isinstance(schema, dict):
            return json.dumps(schema, ensure_ascii=False)
        return schema

    @field_validator("json_schema")
    @classmethod
    def _is_json(cls, schema: str | None) -> str | None:
        if schema is None:
            return None
        if len(schema) > MOST_CHARS:
            raise ValueError(f"the schema has {len(schema)} characters; at most {MOST_CHARS} are compiled")
        try:
            read = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON: {error}") from None
        if not isinstance(read, dict):
            raise ValueError("the schema must be an object")
        return schema

    @field_validator("choice")
    @classmethod
    def _can_be_written(cls, choice: tuple[str, ...]) -> tuple[str, ...]:
        if "" in choice:
            raise ValueError("a choice must not be empty")
        if len(choice) > MOST_CHOICES or sum(map(len, choice)) > MOST_CHARS:
            raise ValueError(f"at most {MOST_CHOICES} choices of {MOST_CHARS} characters together are compiled")
        return choice

    @field_validator("regex", "grammar")
    @classmethod
    def _short(cls, text: str | None) -> str | None:
        if text is not None and not 0 < len(text) <= MOST_GRAMMAR_CHARS:
            raise ValueError(f"it has {len(text)} characters; 1 to {MOST_GRAMMAR_CHARS} are compiled")
        return text

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        given = self.kinds
        if len(given) != 1:
            raise ValueError(
                f"exactly one of json, json_object, regex, choice and grammar is needed, got {' and '.join(given) or 'none'}"
            )
        return self

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that say what the output is."""
        return [name for name in _KINDS if getattr(self, name) not in (None, False, ())]

    @property
    def whitespace(self) -> dict[str, Any]:
        """llguidance's options for the blanks between JSON tokens."""
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        return {"whitespace_flexible": True, "whitespace_pattern": self.whitespace_pattern or _WHITESPACE}
