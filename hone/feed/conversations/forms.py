"""Forms of conversations in data sets, read into one: messages with roles, tools, and for preferences two answers to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hone.feed.chat import FIELDS, ROLES

_OTHER_ROLES = {**ROLES, "model": "assistant", "observation": "tool", "function": "tool", "function_call": "assistant"}
"""Names of roles in data sets of ShareGPT's form."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


class FormError(Exception):
    """A row that is no conversation: `field` is the place in it, `why` what is wrong there."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field, self.why = field, why


def conversation(row: Any, form: str = "auto") -> dict[str, Any]:
    """The conversation in a row: `messages` ({role, content, tool_calls ...}), `tools` if any, of a preference `chosen` and `rejected`,
    lists of messages that each follow `messages`, and of an answer that is judged alone its `label`. Raises FormError with the field that is wrong."""
    if not isinstance(row, dict):
        raise FormError("the row", f"is {_kind(row)}, not an object")
    return _READERS[form if form != "auto" else form_of(row)](row)


def form_of(row: Mapping[str, Any]) -> str:
    """The form of a row by its fields. Raises FormError when it has those of none."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return "preference"
    for name in FIELDS:
        value = row.get(name)
        if isinstance(value, list) and value:
            return "sharegpt" if isinstance(value[0], dict) and "from" in value[0] else "messages"
    if "prompt" in row and "completion" in row:
        return "unpaired" if isinstance(row.get("label"), bool) else "prompt_completion"
    if "instruction" in row and "output" in row:
        return "alpaca"
    names = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise FormError(
        "the row",
        f"has fields {names}, those of no form: messages, conversations, prompt and completion, instruction and output, or "
        "prompt, chosen and rejected",
    )


def _messages_form(row: Mapping[str, Any]) -> dict[str, Any]:
    name = next((name for name in FIELDS if row.get(name)), "messages")
    return _whole(_messages(row.get(name), name), row)


def _sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    name = next((name for name in ("conversations", "conversation", "messages") if row.get(name)), "conversations")
    turns = _list(row.get(name), name)
    messages = []
    for place, turn in enumerate(turns):
        where = f"{name}[{place}]"
        said = _text(_of(turn, where, "from"), f"{where}.from")
        value = _of(turn, where, "value")
        message: dict[str, Any] = {"role": _OTHER_ROLES.get(said, said), "content": value}
        if said == "function_call":
            message |= {"content": "", "tool_calls": [{"type": "function", "function": _json(value, f"{where}.value")}]}
        messages.append({**message, **({"weight": turn["weight"]} if "weight" in turn else {})})
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    return _whole(_messages(messages, name), row)


def _alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    asked, more = _text(row.get("instruction"), "instruction"), row.get("input")
    if more:
        asked = f"{asked}\n\n{_text(more, 'input')}"
    messages = [{"role": "system", "content": _text(row["system"], "system")}] if row.get("system") else []
    for place, turn in enumerate(row.get("history") or ()):
        if not (isinstance(turn, list | tuple) and len(turn) == 2):
            raise FormError(f"history[{place}]", f"is {_kind(turn)}, not a pair of an instruction and its output")
        for role, text in zip(("user", "assistant"), turn):
            messages.append({"role": role, "content": _text(text, f"history[{place}]")})
    messages += [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _text(row.get("output"), "output")},
    ]
    return _whole(messages, row)


def _prompt_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    return _whole(_said(row.get("prompt"), "prompt", "user") + _said(row.get("completion"), "completion"), row)


def _unpaired(row: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt, completion and a label: whether the completion is desirable. Trained on is what follows the prompt."""
    label = row.get("label")
    if not (isinstance(label, bool) or (isinstance(label, int) and label in (0, 1))):
        raise FormError("label", f"is {_kind(label)}, not true (desirable) or false (undesirable)")
    prompt = _said(row.get("prompt"), "prompt", "user")
    found = _whole(prompt + _said(row.get("completion"), "completion"), row)
    return {**found, "label": bool(label), "num_prompt": len(prompt)}


def _preference(row: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt, chosen and rejected; without a prompt it is the messages with which both answers begin."""
    chosen, rejected = (_said(row.get(name), name) for name in ("chosen", "rejected"))
    prompt = _said(row["prompt"], "prompt", "user") if row.get("prompt") else []
    if not prompt:
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise FormError("prompt", "is missing, and chosen and rejected begin with no common message")
    chosen, rejected = (
        answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in (chosen, rejected)
    )
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(one["role"] == "assistant" for one in answer):
            raise FormError(name, "has no message of the assistant")
    return {**_whole(prompt, row, answered=False), "chosen": chosen, "rejected": rejected}


_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "messages": _messages_form,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "preference": _preference,
    "unpaired": _unpaired,
}


def _said(value: Any, field: str, role: str = "assistant") -> list[dict[str, Any]]:
    """A text as one message of `role`, or messages as they are."""
    if isinstance(value, str):
        return [{"role": role, "content": _text(value, field)}]
    return _messages(value, field)


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Messages, checked one by one, without empty fields. Raises FormError."""
    found = []
    for place, given in enumerate(_list(value, field)):
        where = f"{field}[{place}]"
        role = _of(given, where, "role")
        role = "tool" if role == "function" else role
        if role not in _ROLES:
            raise FormError(f"{where}.role", f"is {_kind(role)}, none of {', '.join(_ROLES)}")
        message = {name: part for name, part in given.items() if part is not None} | {"role": role}
        message["content"] = _content(given.get("content"), f"{where}.content")
        calls = given.get("tool_calls") or []
        message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [
                _call(one, f"{where}.tool_calls[{number}]")
                for number, one in enumerate(_list(calls, f"{where}.tool_calls"))
            ]
        if not calls and given.get("content") is None:
            raise FormError(f"{where}.content", "is missing")
        if message.get("weight", 1) not in (0, 1):
            raise FormError(f"{where}.weight", f"is {message['weight']!r:.40}, not 0 or 1")
        found.append(message)
    return found


def _whole(messages: list[dict[str, Any]], row: Mapping[str, Any], answered: bool = True) -> dict[str, Any]:
    """The conversation, with the row's tools. Raises FormError when nobody answers."""
    if answered and not any(one["role"] == "assistant" for one in messages):
        raise FormError("the row", "has no message of the assistant, so that there is nothing to learn")
    tools = row.get("tools")
    tools = _json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return {"messages": messages}
    if not isinstance(tools, list):
        raise FormError("tools", f"is {_kind(tools)}, not a list of tools")
    return {"messages": messages, "tools": [_without_nulls(one) for one in tools]}


def _call(value: Any, where: str) -> dict[str, Any]:
    """A call with its arguments as an object: templates write them as JSON, and would quote a text a second time."""
    function = _of(value, where, "function")
    name, arguments = _of(function, f"{where}.function", "name"), function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"{where}.function.arguments")
    return {**value, "type": "function", "function": {**function, "name": name, "arguments": _without_nulls(arguments)}}


def _content(value: Any, field: str) -> str:
    """A message's text; of content in parts their texts together."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value, field)
    parts = []
    for place, one in enumerate(_list(value, field)):
        if isinstance(one, dict) and one.get("type", "text") != "text":
            raise FormError(f"{field}[{place}].type", f"is {one['type']!r:.40}; only text is read")
        parts.append(
            one if isinstance(one, str) else _text(_of(one, f"{field}[{place}]", "text"), f"{field}[{place}].text")
        )
    return "".join(parts)


def _of(value: Any, where: str, name: str) -> Any:
    """Field `name` of an object."""
    if not isinstance(value, dict):
        raise FormError(where, f"is {_kind(value)}, not an object")
    if value.get(name) is None:
        raise FormError(f"{where}.{name}", "is missing")
    return value[name]


def _list(value: Any, field: str) -> list[Any]:
    if value is None:
        raise FormError(field, "is missing")
    if not isinstance(value, list) or not value:
        raise FormError(field, f"is {_kind(value)}, not a list of messages" if value else "is empty")
    return value


def _text(value: Any, field: str) -> str:
    if value is None:
        raise FormError(field, "is missing")
    if not isinstance(value, str):
        raise FormError(field, f"is {_kind(value)}, not a text")
    try:
        value.encode("utf8")
    except UnicodeEncodeError:
        raise FormError(field, "has half a surrogate pair, which no tokenizer takes") from None
    return value


def _json(value: Any, field: str) -> Any:
    try:
        return json.loads(_text(value, field))
    except (ValueError, RecursionError) as error:
        raise FormError(field, f"is no JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    """`value` without the null fields of its objects: a Parquet column gives every object all fields of any."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
