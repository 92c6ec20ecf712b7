"""What a language model adds: columns from a structured answer about every document, or another version of it."""

from __future__ import annotations

import json
import keyword
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hone.data.expression import parse
from hone.data.llm.base import Answer, Asking

_KINDS = {"number": "number", "integer": "integer", "boolean": "boolean", "text": "string"}


class LLMColumns(Asking):
    """Asks for a JSON object about every document; its fields become columns, by which `keep` may drop (as in FineWeb-Edu, arXiv:2406.17557)."""

    paper: ClassVar[str] = "arXiv:2406.17557"
    fields: dict[str, Literal["number", "integer", "boolean", "text"]] = Field(
        min_length=1,
        description="Name and kind of every field of the answer; numbers and truth values (1 and 0) become columns of numbers.",
    )
    keep: str = Field(
        "", description="Expression over all columns that an answered document must meet; none: all are kept."
    )
    reason: str = Field("llm_columns", description="Name under which documents that `keep` drops are counted.")
    max_chars: int = Field(8000, ge=100, description="Characters of a document that are sent.")
    schema_as: Literal["json_schema", "json_object", "prompt"] = Field(
        "json_schema",
        description="How the form of the answer is requested: a schema that the endpoint enforces, any JSON object, or by the prompt alone.",
    )

    @model_validator(mode="after")
    def _fields_are_names(self) -> LLMColumns:
        for name in self.fields:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"fields.{name} must be letters, digits and underscores, and not a keyword of Python")
        if self.keep:
            parse(self.keep)
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a plan is cached by its spec, and a mapping has no hash

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that it adds."""
        return tuple(self.fields)

    def more(self) -> dict[str, Any]:
        if self.schema_as == "prompt":
            return {}
        if self.schema_as == "json_object":
            return {"response_format": {"type": "json_object"}}
        schema = {
            "type": "object",
            "properties": {name: {"type": _KINDS[kind]} for name, kind in self.fields.items()},
            "required": list(self.fields),
            "additionalProperties": False,
        }
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": schema},
            }
        }

    def request(self, document: dict[str, Any]) -> dict[str, Any]:
        return super().request({**document, "text": document["text"][: self.max_chars]})

    def types(self) -> dict[str, str]:
        """Arrow type of each column, by name."""
        return {name: "string" if kind == "text" else "float64" for name, kind in self.fields.items()}

    def values_of(self, answer: Answer) -> dict[str, Any] | None:
        """The columns' values in an answer, the last JSON object in it; None when a field is missing or of another kind."""
        if answer.refused:
            return None
        found = last_object(answer.text)
        if found is None:
            return None
        made: dict[str, Any] = {}
        for name, kind in self.fields.items():
            value = found.get(name)
            if kind == "text":
                if not isinstance(value, str):
                    return None
                made[name] = value
                continue
            if kind == "boolean":
                good = isinstance(value, bool)
            else:
                good = isinstance(value, int | float) and not isinstance(value, bool)
                good = good and (kind == "number" or value == int(value))
            if not good:
                return None
            made[name] = float(value)
        return made


def last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in `text`, after any reasoning or inside a block of code; None when there is none."""
    reader = json.JSONDecoder(parse_constant=_no_number)
    best, place = None, text.find("{")
    while place >= 0:
        try:
            found, end = reader.raw_decode(text, place)
        except ValueError:
            end = place + 1
        else:
            best = found
        place = text.find("{", end)
    return best


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_THOUGHT = "</think>"


class LLMRephrase(Asking):
    """Replaces documents by a language model's version, for example in the style of an encyclopedia. Maini et al. 2024, arXiv:2401.16380.

    Longer documents than `max_chars` and those without a usable answer keep their text; the column `rephrased` tells which is
    which. All other columns describe the document as it was read.
    """

    paper: ClassVar[str] = "arXiv:2401.16380"
    columns: ClassVar[tuple[str, ...]] = ("rephrased",)
    keep: ClassVar[str] = ""
    reason: ClassVar[str] = ""
    answer_tokens: int = Field(2048, ge=1, description="Most tokens of an answer.")
    max_chars: int = Field(6000, ge=100, description="Longest document, in bytes, that is rephrased.")
    min_share: float = Field(
        0.2, ge=0, description="Least length of an answer as a share of the document's; a shorter one is not used."
    )

    def asks(self, size: int) -> bool:
        return size <= self.max_chars

    def types(self) -> dict[str, str]:
        """Arrow type of each column, by name."""
        return {"rephrased": "bool"}

    def values_of(self, answer: Answer) -> dict[str, Any] | None:
        """{'text'} of an answer, without reasoning; None when it is refused or empty."""
        text = answer.text.rpartition(_THOUGHT)[2].strip()
        return None if answer.refused or not text else {"text": text}
