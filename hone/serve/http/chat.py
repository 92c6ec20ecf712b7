"""Chat replies in which reasoning and tool calls are told from the answer, whole or as a stream of deltas."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hone.serve.http.protocol import ChatBody
from hone.serve.http.reasoning import ReasoningForm, ReasoningSplitter
from hone.serve.http.replies import ChatReply, ReplyChoice, TokenLabels
from hone.serve.http.tools.parser import TextOrCall, ToolCall, ToolParser
from hone.serve.request import Output


@dataclass
class ChatForm:
    """How the replies of one request are read: the tools' parser and the reasoning's marks, None for none of them."""

    tools: Callable[[], ToolParser] | None = None
    reasoning: ReasoningForm | None = None
    prompt: str = ""
    """The end of the prompt's text: templates may begin or end the reasoning themselves."""
    most_calls: int | None = None
    named: bool = False
    """Whether the request named the one tool to call; the finish reason is then that of a text, as OpenAI's is."""


@dataclass
class Parsed:
    """One choice's message so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ChoiceReader:
    """Reads one choice's text as it grows, and gives what each part adds to the message."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._splitter = None if form.reasoning is None else ReasoningSplitter(form.reasoning, form.prompt)
        self._parser = None if form.tools is None else form.tools()
        self._blank = ""  # blanks around calls are no content; whether some are is known when more comes
        self.parsed = Parsed()

    def push(self, text: str) -> list[dict[str, Any]]:
        """Deltas of new text, in order."""
        reasoning, answer = ("", text) if self._splitter is None else self._splitter.push(text)
        return self._deltas(reasoning, self._pieces(answer))

    def finish(self) -> list[dict[str, Any]]:
        """Deltas of what was held back."""
        reasoning, answer = ("", "") if self._splitter is None else self._splitter.push("", final=True)
        pieces = self._pieces(answer) + ([] if self._parser is None else self._parser.finish())
        deltas = self._deltas(reasoning, pieces)
        if self._blank and not self.parsed.calls:
            deltas += self._content(self._blank)
        self._blank = ""
        return deltas

    def _pieces(self, answer: str) -> list[TextOrCall]:
        if self._parser is None:
            return [answer] if answer else []
        return self._parser.push(answer) if answer else []

    def _deltas(self, reasoning: str, pieces: list[TextOrCall]) -> list[dict[str, Any]]:
        deltas = []
        if reasoning:
            self.parsed.reasoning += reasoning
            deltas.append({"reasoning": reasoning, "reasoning_content": reasoning})
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._blank = ""
                deltas += self._call(piece)
            elif self._parser is None:
                deltas += self._content(piece)
            else:
                text = self._blank + piece
                shown = text.rstrip()
                self._blank = text[len(shown) :]
                deltas += self._content(shown) if shown else []
        return deltas

    def _content(self, text: str) -> list[dict[str, Any]]:
        self.parsed.content += text
        return [{"content": text}]

    def _call(self, piece: ToolCall) -> list[dict[str, Any]]:
        calls = self.parsed.calls
        if self._form.most_calls is not None and len(calls) >= self._form.most_calls:
            return []
        function = {"name": piece.name, "arguments": piece.arguments}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        calls.append(call)
        return [{"tool_calls": [{"index": len(calls) - 1, **call}]}]


class ParsedChatReply(ChatReply):
    """/v1/chat/completions with tools or a model whose reasoning is split from its answer."""

    def __init__(self, body: ChatBody, labels: TokenLabels, form: ChatForm, **more: Any) -> None:
        super().__init__(body, labels, **more)
        self._form = form
        self._readers = [ChoiceReader(form) for _ in self.choices]
        self._shows_reasoning = body.include_reasoning

    def _finish_of(self, choice: ReplyChoice) -> str | None:
        called = bool(self._readers[choice.index].parsed.calls)
        return "tool_calls" if called and choice.finish == "stop" and not self._form.named else choice.finish

    def _whole_choice(self, choice: ReplyChoice) -> dict[str, Any]:
        reader = self._readers[choice.index] = ChoiceReader(self._form)
        reader.push("".join(choice.text))
        reader.finish()
        parsed = reader.parsed
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None, "refusal": None}
        if not parsed.calls:
            message["content"] = parsed.content
        else:
            message["tool_calls"] = parsed.calls
        if self._form.reasoning is not None and self._shows_reasoning:
            message |= {"reasoning": parsed.reasoning or None, "reasoning_content": parsed.reasoning or None}
        return self._json(choice, {"message": message}, choice.tokens, choice.logprobs, self._finish_of(choice))

    def _parts(self, choice: ReplyChoice, output: Output, first: bool) -> list[dict[str, Any]]:
        parts = []
        if first:
            parts.append(self._json(choice, {"delta": {"role": "assistant", "content": ""}}, [], [], None))
        reader = self._readers[choice.index]
        deltas = reader.push(output.text)
        if output.finish is not None:
            deltas += reader.finish()
        if not self._shows_reasoning:
            deltas = [delta for delta in deltas if "reasoning" not in delta]
        if not deltas and (output.finish or output.logprobs or self._wants_ids):
            deltas = [{}]
        for place, delta in enumerate(deltas):  # tokens and log-probabilities with the first, the end with the last
            tokens, scored = ([], []) if place else (output.tokens, output.logprobs)
            finish = self._finish_of(choice) if output.finish and place == len(deltas) - 1 else None
            parts.append(self._json(choice, {"delta": delta}, tokens, scored, finish))
        return parts
