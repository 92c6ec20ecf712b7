"""Spans: the token ids of a conversation in its chat template, and which of them the assistant wrote.

A conversation is written and tokenized once, as a whole. What the assistant said in message i is what comes after the prompt
that a server would have given it, up to the end of its turn. It is found in one of three ways, the first that fits:
ids: the prompt of messages[:i] and the text of messages[:i + 1], each tokenized alone, are both prefixes of the whole's ids;
characters: the same of the texts, or, where a template writes a message in another way when it is the last one, what changes in
the whole when the message is replaced; tokens are matched with it by their offsets;
generation: the template itself marks it with {% generation %}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hone.base.errors import SpecError

if TYPE_CHECKING:
    from hone.feed.conversations.spec import TrainOn
    from hone.model.tokenizer import Tokenizer

_STAND_IN = "\ue000in place of a message\ue001"
"""Text with characters of the private use area at both ends, which no message has there."""
_TAIL = 8
"""Characters at the end of a prompt by which it is known again in the whole."""
Span = tuple[int, int]


class Unusable(Exception):
    """A conversation that cannot be trained on: `reason` is counted, `why` is said."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason, self.why = reason, why


class Encoded(NamedTuple):
    """`ids` int64 [n] of a conversation, `trained` bool [n] where a token is a target, and the `ways` in which spans were found."""

    ids: np.ndarray
    trained: np.ndarray
    ways: tuple[str, ...]


class Spans:
    """Writes and tokenizes conversations for one tokenizer. `eos_id` closes a last message whose template has no end of turn."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int, train_on: TrainOn = "assistant") -> None:
        self.tokenizer, self.eos_id, self.train_on = tokenizer, eos_id, train_on
        self._ends = tokenizer.special_ids - {tokenizer.bos_id} | {eos_id}
        spellings = sorted(filter(None, map(tokenizer.token_text, tokenizer.special_ids)), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, first: int = 0) -> Encoded:
        """The ids of `messages` and which are trained on: those of assistant messages from number `first` on, by `train_on`.

        The token that ends a turn belongs to it. Raises Unusable when a text spells a special token, when the template refuses
        the messages, or when it cannot be told which tokens one of them became.
        """
        self._check_spellings(messages, tools)
        wanted = [place for place, one in enumerate(messages) if one["role"] == "assistant" and place >= first]
        wanted = wanted[-1:] if self.train_on == "last" else wanted
        whole = _Whole(self.tokenizer, messages, tools)
        ids = whole.ids
        if self.tokenizer.bos_id is not None and ids[:2] == [self.tokenizer.bos_id] * 2:
            raise Unusable("two_bos", "the chat template writes the token that begins a text twice")
        found = whole.spans(wanted)
        trained = np.zeros(len(ids), bool)
        for place in wanted:
            begin, end = found[place][0]
            end, closed = self._end_of_turn(ids, begin, end)
            trained[begin:end] = messages[place].get("weight", 1) != 0
            if not closed and all(map(self._is_blank, ids[end:])):  # nothing follows: the template ends no turns
                trained = np.append(trained[:end], trained[begin])
                ids = [*ids[:end], self.eos_id]
        if self.train_on == "all":
            trained[:] = True
        return Encoded(np.array(ids, np.int64), trained, tuple(found[place][1] for place in wanted))

    def _end_of_turn(self, ids: Sequence[int], begin: int, end: int) -> tuple[int, bool]:
        """(the end of a span, right after the special token that ends the turn; whether there is one).

        Blanks after it are the template's. Where the next message's header ends a turn, as in GLM, its first token is part of it.
        """
        last = end
        while last > begin and self._is_blank(ids[last - 1]):
            last -= 1
        if last > begin and ids[last - 1] in self._ends:
            return last, True
        following = end
        while following < len(ids) and self._is_blank(ids[following]):
            following += 1
        if following < len(ids) and ids[following] in self._ends:
            return following + 1, True
        return end, False

    def _is_blank(self, token: int) -> bool:
        return token not in self._ends and not self.tokenizer.token_bytes(token).strip()

    def _check_spellings(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Raises Unusable when a text spells a special token: as one it would end a turn, or begin another's."""
        if self._special is None:
            return
        named = [(f"messages[{place}]", one) for place, one in enumerate(messages)] + [("tools", tools)]
        for name, value in named:
            for where, text in _texts(name, value):
                if found := self._special.search(text):
                    raise Unusable("special_token_in_text", f"{where} spells the token {found[0]}")


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """(place, text) of each text in `value`, such as those of a call's arguments, and of the names of its fields."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield where, str(name)
            yield from _texts(f"{where}.{name}", one)
    elif isinstance(value, Sequence):
        for place, one in enumerate(value):
            yield from _texts(f"{where}[{place}]", one)


class _Whole:
    """A conversation as one text with its tokens, in which messages are looked for."""

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        self.tokenizer = tokenizer
        self.messages = [{name: value for name, value in one.items() if name != "weight"} for one in messages]
        self.variables = {"tools": tools} if tools else {}
        try:
            self.text = self._write(self.messages)
        except SpecError as error:
            raise Unusable("refused_by_template", error.what) from None
        encoding = tokenizer.core.encode(self.text, add_special_tokens=False)
        self.ids: list[int] = encoding.ids
        self._offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def spans(self, wanted: Sequence[int]) -> dict[int, tuple[Span, str]]:
        """(first token and the one after the last, how it was found) of each message in `wanted`. Raises Unusable."""
        texts = {place: self._prefixes(place) for place in wanted}
        known = list(dict.fromkeys(text for pair in texts.values() for text in pair if text is not None))
        ids = dict(zip(known, self.tokenizer.encode_batch(known, add_special_tokens=False)))
        found, marked = {}, None
        for place, pair in texts.items():
            span, how = self._by_ids(*(ids.get(text) for text in pair)), "ids"  # type: ignore[arg-type]
            if span is None:
                span, how = self._by_characters(place, *pair), "characters"
            if span is None:
                marked = self._marked() if marked is None else marked
                span, how = marked.get(place), "generation"
            if span is None:
                raise Unusable(
                    "message_not_found",
                    f"messages[{place}]: the chat template's text does not tell which part of it is this message; mark what the "
                    "assistant writes with {% generation %} in the template",
                )
            found[place] = (span, how)
        return found

    def _write(self, messages: Sequence[Mapping[str, Any]], opened: bool = False, marks: bool = False) -> str:
        return self.tokenizer.chat(list(messages), add_generation_prompt=opened, marks=marks, **self.variables)  # type: ignore[arg-type]

    def _tried(self, messages: Sequence[Mapping[str, Any]], opened: bool = False) -> str | None:
        """The text of other messages than the conversation's; None when the template refuses them."""
        try:
            return self._write(messages, opened)
        except SpecError:
            return None

    def _prefixes(self, place: int) -> tuple[str | None, str | None]:
        """The prompt before message `place`, and the text that ends with it; None for what is no prefix of the whole."""
        pair = self._tried(self.messages[:place], opened=True), self._tried(self.messages[: place + 1])
        before, after = (text if text is not None and self.text.startswith(text) else None for text in pair)
        return before or None, after

    def _by_ids(self, before: list[int] | None, after: list[int] | None) -> Span | None:
        if before is None or after is None or len(before) >= len(after):
            return None
        fits = self.ids[: len(after)] == after and after[: len(before)] == before
        return (len(before), len(after)) if fits else None

    def _by_characters(self, place: int, before: str | None, after: str | None) -> Span | None:
        start, end = (None if text is None else len(text) for text in (before, after))
        if start is None or end is None:
            stand_in = {"role": "assistant", "content": _STAND_IN}
            other = self._tried([*self.messages[:place], stand_in, *self.messages[place + 1 :]])
            if other is None or other.count(_STAND_IN) != 1:
                return None
            start = self._after_prompt(place, _shared(self.text, other)) if start is None else start
            end = len(self.text) - _shared(self.text[::-1], other[::-1]) if end is None else end
        return self._tokens(start, end)

    def _after_prompt(self, place: int, start: int) -> int:
        """Where the answer that has its first letter at `start` begins: blanks with which the prompt of a server does not end are part of it."""
        prompt = self._tried(self.messages[:place], opened=True) or ""
        end = len(self.text[:start].rstrip())
        ends = (at for at in range(end, start) if prompt.endswith(self.text[max(at - _TAIL, 0) : at]))
        return next(ends, start)

    def _tokens(self, start: int, end: int) -> Span | None:
        """The tokens of characters `start` to `end`; one that is partly before them is one of them: it is written as a whole."""
        if not len(self.ids) or start >= end:
            return None
        begin = int(np.searchsorted(np.maximum.accumulate(self._offsets[:, 1]), start, side="right"))
        finish = int(np.searchsorted(np.maximum.accumulate(self._offsets[:, 0]), end, side="left"))
        return (begin, finish) if begin < finish else None

    def _marked(self) -> dict[int, Span]:
        """The spans of all assistant messages by the template's own marks; none where it has not one for each."""
        pieces = re.split("([\ue002\ue003])", self._write(self.messages, marks=True))
        text, opened, found = "", 0, []
        for piece in pieces:
            if piece == "\ue002":
                opened = len(text)
            elif piece == "\ue003":
                found.append(self._tokens(opened, len(text)))
            else:
                text += piece
        places = [place for place, one in enumerate(self.messages) if one["role"] == "assistant"]
        if text != self.text or len(found) != len(places):
            return {}
        return {place: span for place, span in zip(places, found) if span is not None}


def _shared(one: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    for count, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return count
    return min(len(one), len(other))
