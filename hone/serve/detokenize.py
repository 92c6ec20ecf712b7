"""Incremental detokenization: no incomplete characters, no possible start of a stop text, and in sum the full decode."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from hone.base.errors import SpecError
from hone.model.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CONTEXT = 6
"""Prompt tokens decoded before the output, so that a sentencepiece decoder keeps a leading space."""


class Detokenizer:
    """The text of a growing output. `push` returns the text that is final after a token, `flush` the rest at the end."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._bytes: codecs.IncrementalDecoder | None = None
        if type(tokenizer.core.decoder).__name__ == "ByteLevel":
            self._bytes = codecs.getincrementaldecoder("utf8")(errors="replace")
            return
        self._ids = list(prompt[-_CONTEXT:])
        self._from = 0  # decoding starts here: early enough for the text after `_done` to be right
        self._done = len(self._ids)
        self._known = tokenizer.decode(self._ids, skip_special_tokens) if self._ids else ""

    def push(self, token: int) -> str:
        """New text after `token`; '' while a character is unfinished."""
        if self._bytes is not None:
            return self._bytes.decode(_piece(self._tokenizer, token, self._skips))
        self._ids.append(token)
        # sentencepiece decodes a whole run of byte tokens to U+FFFD if one of them is invalid: wait for its end.
        if (self._skips and token in self._tokenizer.special_ids) or _BYTE_TOKEN.fullmatch(
            self._tokenizer.token_text(token)
        ):
            return ""
        return self._advance()

    def flush(self) -> str:
        """The text held back so far; incomplete characters become U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._advance()

    def _advance(self) -> str:
        text = self._tokenizer.decode(self._ids[self._from :], self._skips)
        new = text[len(self._known) :]
        if new:
            self._from, self._done = self._done, len(self._ids)
            self._known = self._tokenizer.decode(self._ids[self._from :], self._skips)
        return new


def _piece(tokenizer: Tokenizer, token: int, skips: bool = True) -> bytes:
    """The bytes a token adds to a byte-level text; with `skips` none for special tokens."""
    if skips and token in tokenizer.special_ids:
        return b""
    if token in tokenizer.added_ids:
        return tokenizer.decode([token], skips).encode()
    return tokenizer.token_bytes(token)


class TextStream:
    """A request's text with its stop texts: `push` and `finish` return text to show; `matched` is the stop text found."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded, but may be the start of a stop text
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """Text that is final after `token`; when a stop text is complete, `matched` is set and nothing follows."""
        self._num_tokens += 1
        return self._take(self._detokenizer.push(token))

    def finish(self, *, flush: bool = True) -> str:
        """The rest of the text (nothing after a matched stop)."""
        if self.matched is not None:
            return ""
        text = self._take(self._detokenizer.flush()) if flush else ""
        if self.matched is None:
            text, self._held = text + self._held, ""
        return text

    def _take(self, new: str) -> str:
        if not self._stops or self._num_tokens < self._min_tokens:
            text, self._held = self._held + new, ""
            return text
        text = self._held + new
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            index, stop = min(found)
            self.matched, self._held = stop, ""
            return text[: index + len(stop)] if self._include_stop else text[:index]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def prompt_ids(prompt: str | Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
    """The token ids of a text or of token ids. Raises SpecError for a text without a tokenizer."""
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise SpecError("a text prompt needs a tokenizer", fix="send token ids, or give the engine a tokenizer")
    return tokenizer.encode(prompt)
