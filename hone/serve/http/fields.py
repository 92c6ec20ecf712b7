"""Types of the fields of request bodies, and the bodies of nested ones: forms of an output, tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_LISTED = 1024
MAX_TOOLS = 128


def number_of(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def text_of(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode("utf8")
        except UnicodeEncodeError:
            raise ValueError("contains half of a surrogate pair, which is no character") from None
    return value


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(number_of)]
Float = Annotated[FiniteFloat, BeforeValidator(number_of)]
Text = Annotated[str, BeforeValidator(text_of)]
Id = Annotated[int, BeforeValidator(number_of), Field(ge=0, lt=2**31)]
Bias = Annotated[
    dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[Float, Field(ge=-100, le=100)]], Field(max_length=MAX_LISTED)
]
Stops = Annotated[list[Text], Field(fail_fast=True), Field(max_length=MAX_STOPS), BeforeValidator(as_list)]
Ids = Annotated[list[Id], Field(fail_fast=True), Field(max_length=MAX_LISTED)]
Words = Annotated[list[Text], Field(fail_fast=True), Field(max_length=MAX_LISTED), BeforeValidator(as_list)]
Name = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class JsonSchema(BaseModel):
    """`response_format.json_schema`. A schema is always enforced, whether `strict` is set or not."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    name: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """`response_format` of the OpenAI API."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(BaseModel):
    """`structured_outputs`, vLLM's extension: one of the first five."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True), Field(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    whitespace_pattern: Text | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False


class Function(BaseModel):
    """A tool's function. `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow")
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """One of `tools`."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """The function that a named `tool_choice` chooses."""

    name: Text


class ToolChoice(BaseModel):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName
