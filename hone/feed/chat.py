"""Chat: conversations in rows, written as text with the role before each message."""

from __future__ import annotations

import json
from typing import Any

FIELDS = ("messages", "conversations", "conversation")
"""Fields that hold a conversation in data sets of chats; they are used where a row has no text."""
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}
"""Names of roles in older data sets (ShareGPT)."""


def rendered(value: Any) -> str | None:
    """The text of a conversation: 'role: content' of each message, with a blank line between them; None for anything else.

    Messages are objects with `role` and `content`, or `from` and `value`. Content in parts keeps its texts, one on a line; calls
    of tools follow as JSON. Messages without either (such as images) are left out.
    """
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        return None
    said = []
    for one in value:
        role = one.get("role", one.get("from"))
        if not isinstance(role, str):
            return None
        content = _content(one.get("content", one.get("value")))
        calls = [json.dumps(call, ensure_ascii=False, sort_keys=True) for call in one.get("tool_calls") or ()]
        whole = "\n".join(part for part in (content, *calls) if part)
        if whole:
            said.append(f"{ROLES.get(role, role)}: {whole}")
    return "\n\n".join(said) if said else None


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, list):
        return ""
    parts = [one if isinstance(one, str) else one.get("text") for one in value if isinstance(one, str | dict)]
    return "\n".join(part.strip() for part in parts if isinstance(part, str) and part.strip())


def chat_in(row: Any, text_field: str) -> str | None:
    """The text of a row whose `text_field` is a conversation, or that has none ('text' by default) but has one of FIELDS."""
    if not isinstance(row, dict):
        return None
    if text_field in row:
        return rendered(row[text_field])
    return next((text for name in FIELDS if (text := rendered(row.get(name)))), None) if text_field == "text" else None
