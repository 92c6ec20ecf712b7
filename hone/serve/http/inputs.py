"""What a request's prompt or messages hold, checked: texts, token ids, parts of messages, earlier tool calls."""

from __future__ import annotations

import json
from typing import Any

from hone.serve.http.fields import text_of
from hone.serve.http.protocol import ApiError, Message, bounded

Prompt = str | list[int]


def split_prompts(prompt: Any, vocab_size: int) -> list[Prompt]:
    """The prompts in `prompt`: str, list[str], list[int] or list[list[int]]. Raises ApiError 400 for anything else."""
    if isinstance(prompt, str):
        return [_prompt_text(prompt, "prompt")]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], str):
            return [_prompt_text(item, f"prompt.{index}") for index, item in enumerate(prompt)]
        if isinstance(prompt[0], list):
            return [check_ids(item, vocab_size, f"prompt.{index}") for index, item in enumerate(prompt)]
        return [check_ids(prompt, vocab_size, "prompt")]
    raise ApiError(
        400, "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", param="prompt"
    )


def _prompt_text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise ApiError(400, f"{param} must be a text like the others in the list", param=param)
    try:
        return str(text_of(value))
    except ValueError as error:
        raise ApiError(400, f"{param} {error}", param=param) from None


def check_ids(ids: Any, vocab_size: int, param: str) -> list[int]:
    """`ids` when it is a non-empty list of token ids of this model. Raises ApiError 400 otherwise."""
    if not isinstance(ids, list) or not ids:
        raise ApiError(400, f"{param} must be a non-empty list of token ids", param=param)
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise ApiError(400, f"{param}.{position} must be a token id (an integer)", param=param)
        if not 0 <= token < vocab_size:
            shown = bounded(str(token), 40) if abs(token) < 10**40 else "a number of more than 40 digits"
            raise ApiError(
                400, f"{param}.{position} is token {shown}, the vocabulary has ids 0 to {vocab_size - 1}", param=param
            )
    return ids


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them: content parts joined to one text. Raises ApiError for other media."""
    plain = []
    for index, message in enumerate(messages):
        param = f"messages.{index}.content"
        content = message.content
        if isinstance(content, list):
            content = "".join(_part_text(part, param) for part in content)
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise ApiError(400, f"{param} must be a text or a list of text parts", param=param)
        more = dict(message.model_extra or {})
        if more.get("tool_calls"):
            more["tool_calls"] = _with_arguments(more["tool_calls"], f"messages.{index}.tool_calls")
        plain.append({**more, "role": message.role, "content": _prompt_text(content, param)})
    return plain


def _with_arguments(calls: Any, param: str) -> list[dict[str, Any]]:
    """Earlier calls with their arguments as objects, which templates write as JSON. Raises ApiError for other calls."""
    found = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(400, f"{param} must be a list of calls with a function", param=param)
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{param} has arguments that are not JSON: {error}", param=param) from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else None
    shown = f"'{kind[:40]}'" if isinstance(kind, str) else "something else"
    raise ApiError(400, f"{param} holds {shown}; this model reads text only", param=param, code="unsupported")
