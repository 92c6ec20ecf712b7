"""Replies of /v1/responses: items of reasoning, text and calls, whole or as OpenAI's typed events."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from hone.serve.http.chat import ChatForm, ChoiceReader
from hone.serve.http.endpoints.response_body import ResponsesBody
from hone.serve.http.protocol import ChatBody
from hone.serve.http.replies import Reply, ReplyChoice, dump
from hone.serve.request import Output


class OutputItems:
    """The output items of one response, built from deltas; each step gives the events that tell of it."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []

    def take(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of one delta of a chat reply."""
        if "tool_calls" in delta:
            return [event for call in delta["tool_calls"] for event in self._call(call["id"], call["function"])]
        kind, text = ("reasoning", delta["reasoning"]) if "reasoning" in delta else ("message", delta["content"])
        events = []
        if self._open is None or self._open["type"] != kind:
            events = [*self.close(), *self._begin(kind)]
        self._text.append(text)
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        more = {} if kind == "reasoning" else {"logprobs": []}
        return [*events, {"type": name, **self._where, "content_index": 0, "delta": text, **more}]

    @property
    def _where(self) -> dict[str, Any]:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open["id"], "output_index": len(self.done)}

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        name = uuid.uuid4().hex[:24]
        self._text = []
        if kind == "reasoning":
            self._open = {"type": kind, "id": f"rs_{name}", "summary": [], "content": [], "status": "in_progress"}
        else:
            self._open = {
                "type": kind,
                "id": f"msg_{name}",
                "role": "assistant",
                "content": [],
                "status": "in_progress",
            }
        part = {"type": "reasoning_text" if kind == "reasoning" else "output_text", "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        return [
            {"type": "response.output_item.added", "output_index": len(self.done), "item": {**self._open}},
            {"type": "response.content_part.added", **self._where, "content_index": 0, "part": part},
        ]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Ends the open item."""
        item = self._open
        if item is None:
            return []
        where, text = {**self._where, "content_index": 0}, "".join(self._text)
        if item["type"] == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            ended = {"type": "response.reasoning_text.done", **where, "text": text}
        else:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            ended = {"type": "response.output_text.done", **where, "text": text, "logprobs": []}
        item |= {"content": [part], "status": status}
        events = [
            ended,
            {"type": "response.content_part.done", **where, "part": part},
            {"type": "response.output_item.done", "output_index": len(self.done), "item": item},
        ]
        self.done.append(item)
        self._open = None
        return events

    def _call(self, call_id: str, function: dict[str, str]) -> list[dict[str, Any]]:
        events = self.close()
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex[:24]}",
            "call_id": call_id,
            "name": function["name"],
        }
        where, arguments = {"item_id": item["id"], "output_index": len(self.done)}, function["arguments"]
        index = {"output_index": len(self.done)}
        begun, whole = ({**item, "arguments": text, "status": status} for text, status in (("", "in_progress"), (arguments, "completed")))  # fmt: skip
        self.done.append(whole)
        return [
            *events,
            {"type": "response.output_item.added", **index, "item": begun},
            {"type": "response.function_call_arguments.delta", **where, "delta": arguments},
            {"type": "response.function_call_arguments.done", **where, "name": item["name"], "arguments": arguments},
            {"type": "response.output_item.done", **index, "item": whole},
        ]


class ResponsesReply(Reply):
    """/v1/responses. `count` gives the tokens of a text, for the usage of reasoning."""

    stream_object = whole_object = "response"

    def __init__(
        self, body: ChatBody, asked: ResponsesBody, form: ChatForm | None, count: Callable[[str], int], **more: Any
    ) -> None:
        super().__init__(body, **more)
        self._asked = asked
        self._form = form or ChatForm()
        self._count = count
        self._reader = ChoiceReader(self._form)
        self._items = OutputItems()
        self._sequence = 0

    def _object(self, status: str) -> dict[str, Any]:
        asked = self._asked
        cut = status == "incomplete"
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {"format": {"type": "text"}}
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "model": self._head["model"],
            "output": self._items.done,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": text,
            "tool_choice": asked.tool_choice
            if isinstance(asked.tool_choice, str)
            else _dumped(asked.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage, reasoning = self.usage(), self._reader.parsed.reasoning
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._count(reasoning) if reasoning else 0},
            "total_tokens": usage["total_tokens"],
        }

    def whole(self) -> dict[str, Any]:
        """The finished response."""
        (choice,) = self.choices
        self._end(self._reader.push("".join(choice.text)), choice)
        return self._object(_status(choice))

    def _end(self, deltas: list[dict[str, Any]], choice: ReplyChoice) -> list[dict[str, Any]]:
        """The events of the last deltas and of what is still open; a response without any has an empty message."""
        events = [event for delta in [*deltas, *self._reader.finish()] for event in self._items.take(delta)]
        events += self._items.close(_status(choice))
        if not self._items.done:
            events += [*self._items.take({"content": ""}), *self._items.close(_status(choice))]
        return events

    def events(self, choice: ReplyChoice, output: Output) -> bytes:
        """The events of one new output."""
        events: list[dict[str, Any]] = []
        if not choice.begun:
            choice.begun = True
            events += [
                {"type": f"response.{name}", "response": self._object("in_progress")}
                for name in ("created", "in_progress")
            ]
        deltas = self._reader.push(output.text)
        if output.finish is None:
            events += [event for delta in deltas for event in self._items.take(delta)]
        else:
            events += self._end(deltas, choice)
            status = _status(choice)
            events.append({"type": f"response.{status}", "response": self._object(status)})
        return b"".join(self._event(event) for event in events)

    def closing(self) -> bytes:
        """Nothing: the last event says that the response is complete."""
        return b""

    def _event(self, event: dict[str, Any]) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return f"event: {event['type']}\ndata: ".encode() + dump(numbered) + b"\n\n"


def _status(choice: ReplyChoice) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _dumped(model: Any) -> Any:
    return None if model is None else model.model_dump(exclude_unset=True)
