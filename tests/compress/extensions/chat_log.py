"""A source of conversations of someone's own: a log of lines `NAME: what was said`, with an empty line between conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

ROLES = {b"visitor": "user", b"helper": "assistant"}


def rows(stream: IO[bytes], problems: Counter[str]) -> Iterator[dict[str, Any]]:
    """A conversation a row, under the names of chat templates; a line of someone unknown is counted in `problems`."""
    messages: list[dict[str, str]] = []
    for line in stream:
        name, colon, said = line.partition(b": ")
        if name in ROLES and colon:
            messages.append({"role": ROLES[name], "content": said.decode().strip()})
        elif line.strip():
            problems[f"a line of {name.decode(errors='replace').strip()}"] += 1
        elif messages:
            yield {"messages": messages}
            messages = []
    if messages:
        yield {"messages": messages}
