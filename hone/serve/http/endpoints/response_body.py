"""The body of /v1/responses, and the chat request that it means."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hone.serve.http.fields import MAX_TOOLS, Float, Int, Name, Text
from hone.serve.http.protocol import ApiError, Body, ChatBody, from_validation


class TextFormat(BaseModel):
    """`text.format`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """`text`."""

    model_config = ConfigDict(extra="ignore")
    format: TextFormat = TextFormat()


class FunctionTool(BaseModel):
    """One of `tools`; hosted ones (web_search ...) are not on this server."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class ChosenTool(BaseModel):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: Text


class ResponsesBody(Body):
    """POST /v1/responses: text in, text and calls of functions out. Nothing is stored, so replies cannot be continued by id."""

    model: Text | None = None
    input: Any
    instructions: Text | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True), Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: Int | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    priority: Int = 0
    cache_salt: Text | None = None
    request_id: Text | None = None

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options", "reasoning"}
    )
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "include": ([],),
        "top_logprobs": (0,),
        "max_tool_calls": (),
    }

    def chat(self) -> ChatBody:
        """The chat request of the same meaning. Raises ApiError 400."""
        messages = _messages(self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        shape = self.text.format if self.text else TextFormat()
        form: dict[str, Any] = {"type": shape.type}
        if shape.type == "json_schema":
            if shape.schema_ is None:
                raise ApiError(400, "text.format of type json_schema needs a schema", param="text.format.schema")
            form["json_schema"] = {"name": shape.name, "schema": shape.schema_}
        choice = self.tool_choice
        values = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": form if shape.type != "text" else None,
            "tools": [{"type": "function", "function": _function(tool)} for tool in self.tools or ()],
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, ChosenTool)
            else choice,
        }
        same = ("temperature", "top_p", "stream", "parallel_tool_calls", "chat_template_kwargs", "seed", "top_k", "min_p",
                "priority", "cache_salt", "request_id")  # fmt: skip
        values |= {name: getattr(self, name) for name in same}
        try:
            return ChatBody.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            raise from_validation(error) from None


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {
        name: value for name, value in tool.model_dump(exclude_unset=True).items() if name not in ("type", "strict")
    }


def _messages(given: Any) -> list[dict[str, Any]]:
    """Chat messages of `input`, a text or a list of items. Raises ApiError 400 that names the item."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, "input must be a text or a list of items", param="input")
    found: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        param = f"input.{index}"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
            role = "system" if item["role"] == "developer" else item["role"]  # templates know no developer
            found.append({"role": role, "content": _content(item.get("content"), f"{param}.content")})
        elif kind == "function_call" and isinstance(item.get("name"), str):
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item["name"], "arguments": item.get("arguments") or "{}"},
            }
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{param}.output")
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # earlier reasoning is not shown to models again
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else "something else"
            raise ApiError(
                400,
                f"{param} is {shown}; messages of a role, function_call, function_call_output and reasoning are read",
                param=param,
                code="unsupported",
            )
    return found


def _content(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{param} must be a text or parts of text", param=param, code="unsupported")
        texts.append(part["text"])
    return "".join(texts)
