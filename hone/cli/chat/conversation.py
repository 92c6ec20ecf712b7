"""A conversation: its turns, what of it the model reads next, and which turns go when its context is full."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.base.errors import FitError, SpecError

Messages = list[dict[str, str]]
_RESERVE = 1024
"""Tokens that are left for an answer at least, if it may have so many, and they are no more than a quarter of the context."""


@dataclass
class Answer:
    """One answer as it grows. `thought` is what a server keeps apart as reasoning. Counts are None where it does not tell them."""

    text: str = ""
    thought: str = ""
    finish: str | None = None
    num_prompt: int | None = None
    num_cached: int | None = None
    num_tokens: int | None = None
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def summary(self) -> str:
        """Length and speed in a line."""
        parts = []
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens")
            if self.num_tokens > 1 and self.last_s > self.first_s:
                parts[0] += f", {(self.num_tokens - 1) / (self.last_s - self.first_s):.1f} tokens/s"
        parts.append(f"first after {self.first_s:.2f} s")
        if self.num_prompt is not None:
            cached = "" if self.num_cached is None else f", {self.num_cached} of them cached"
            parts.append(f"prompt of {self.num_prompt}{cached}")
        if self.finish == "length":
            parts.append("cut by max_tokens")
        return "; ".join(parts)


@dataclass
class Conversation:
    """User's and assistant's turns in order. Without `chat` they are one text, which the model continues."""

    chat: bool
    system: str = ""
    turns: Messages = field(default_factory=list)
    withdrawn: str | None = None
    """The last question, if it got no answer."""

    @property
    def messages(self) -> Messages:
        """What a chat template gets."""
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)

    @property
    def prompt(self) -> Messages | str:
        """What the model reads next: messages, or without `chat` the text so far."""
        return self.messages if self.chat else "".join(turn["content"] for turn in self.turns)

    def ask(self, text: str) -> None:
        """Adds a turn of the user; in a text it begins a new line."""
        self.withdrawn = None
        before = self.turns[-1]["content"] if self.turns and not self.chat else "\n"
        self.turns.append({"role": "user", "content": text if before.endswith("\n") else f"\n{text}"})

    def answered(self, text: str) -> None:
        """Adds the answer to the last question; without any text the question goes as well."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.withdraw()

    def withdraw(self) -> None:
        """Takes the last question back; `again` asks it again."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.withdrawn = self.turns.pop()["content"]

    def again(self) -> None:
        """Makes the last question the last turn: its answer is dropped. Raises SpecError when nothing was asked."""
        if self.withdrawn is not None:
            self.turns.append({"role": "user", "content": self.withdrawn})
            self.withdrawn = None
        elif self.turns:
            self.turns.pop()
        else:
            raise SpecError("nothing was asked yet", fix="ask something first")

    def clear(self) -> None:
        """Drops all turns."""
        self.turns.clear()
        self.withdrawn = None

    def drop_oldest(self) -> bool:
        """Drops the oldest question with its answer; False when only the last question is left."""
        later = [place for place, turn in enumerate(self.turns) if place and turn["role"] == "user"]
        if not later:
            return False
        del self.turns[: later[0]]
        return True

    def fit(
        self, limit: int, wanted: int | None, count: Callable[[Messages | str], int | None]
    ) -> tuple[int | None, int]:
        """Drops oldest turns until prompt and answer fit `limit` tokens; tokens left for the answer, and turns dropped.

        `wanted` is the limit of the answer's tokens, `count` counts a prompt's tokens (None: it cannot, and nothing is
        dropped). Where it drops any it makes room for some turns more, because every drop makes the model read the rest
        again. Raises FitError when the last question alone is too long.
        """
        used = count(self.prompt)
        if used is None:
            return None, 0
        reserve = min(_RESERVE, limit // 4, _RESERVE if wanted is None else wanted)
        dropped, most = 0, limit - reserve
        while used > most and self.drop_oldest():
            dropped, most = dropped + 1, max(limit - reserve - limit // 4, limit // 4)
            used = count(self.prompt) or 0
        if used >= limit:
            raise FitError(
                f"the message and the system prompt have {used} tokens, the context {limit}",
                fix="shorten them, or use a model with a longer context",
            )
        room = limit - used
        return room if wanted is None else min(wanted, room), dropped

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, in the form of the API and of chat data sets."""
        told: dict[str, Any] = {"messages": self.messages} if self.chat else {"text": self.prompt}
        path.write_text(json.dumps(told, ensure_ascii=False, indent=1) + "\n", encoding="utf8")
