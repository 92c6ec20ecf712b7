"""The model of a running server with OpenAI's API, over HTTP with nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from hone.base.errors import FitError, HoneError, MachineError, SpecError
from hone.cli.chat.conversation import Answer, Messages
from hone.cli.chat.spec import ChatSpec
from hone.serve.http.defaults import GenerationDefaults
from hone.serve.http.spec import API_KEY_VARIABLE
from hone.serve.request import SamplingParams

_CONNECT_S, _SILENT_S = 10.0, 600.0
"""Seconds for a short question; seconds in which a stream may be silent, such as while it waits in the server's queue."""
_API_NAMES = {"include_stop": "include_stop_str_in_output"}


class RemoteModel:
    """A server's model. Its own sampling defaults hold for what is not given here."""

    interruptible = True
    needs_limit = False
    defaults = GenerationDefaults()

    def __init__(self, spec: ChatSpec) -> None:
        parts = None
        with contextlib.suppress(ValueError):
            parts = urlsplit(spec.url)
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecError(f"--url={spec.url} is no address of a server", fix="write --url=http://HOST:PORT")
        self._root = spec.url.rstrip("/").removesuffix("/v1")
        self._key = spec.api_key or os.environ.get(API_KEY_VARIABLE, "")
        here = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))
        listed = self._short("/v1/models").get("data")
        cards = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        lengths = {str(card["id"]): card.get("max_model_len") for card in cards if "id" in card}
        if not lengths:
            raise MachineError(f"{self._root} names no model", fix="check the address")
        if spec.model and spec.model not in lengths:
            raise SpecError(f"{self._root} has no model '{spec.model}'", fix=f"it has: {', '.join(lengths)}")
        self.name = spec.model or next(iter(lengths))
        length = lengths[self.name]
        self.max_model_len = length if isinstance(length, int) else None
        self.chat = self._has_template()

    def _has_template(self) -> bool:
        """Whether the model has a chat template. Where the server tells nothing of it, it is taken to have one."""
        for path, body in (
            ("/tokenizer_info", None),
            ("/tokenize", {"model": self.name, "messages": [{"role": "user", "content": "a"}]}),
        ):
            try:
                told = self._short(path, body)
            except HoneError as error:
                if "chat template" in error.what:
                    return False
            else:
                if "chat_template" in told:
                    return told["chat_template"] is not None
        return True

    def count(self, prompt: Messages | str) -> int | None:
        """Tokens of a prompt; None where the server does not count them."""
        form = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        try:
            counted = self._short("/tokenize", {"model": self.name, **form}).get("count")
        except FitError:
            raise
        except HoneError:
            return None
        return counted if isinstance(counted, int) else None

    def pieces(self, prompt: Messages | str, given: SamplingParams, max_tokens: int | None) -> Iterator[Answer]:
        """The answer after every event. Closing the iterator ends the connection, and with it the request."""
        chat = not isinstance(prompt, str)
        body = {
            "model": self.name,
            "messages" if chat else "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{_API_NAMES.get(name, name): value for name, value in self._fields(given).items()},
            **({} if max_tokens is None else {"max_tokens": max_tokens}),
        }
        answer, started = Answer(), time.monotonic()
        with self._open(f"/v1/{'chat/' if chat else ''}completions", body, _SILENT_S) as reply:
            for event in self._events(reply):
                try:
                    self._take(answer, event, time.monotonic() - started)
                except (AttributeError, TypeError):
                    raise self._lost(f"an event in another form: {json.dumps(event):.80}") from None
                yield answer
        if answer.finish is None:
            raise MachineError(
                f"{self._root} ended the answer in the middle", fix="see the server's log; /retry asks again"
            )

    def _events(self, reply: Any) -> Iterator[Any]:
        """The values of a stream of events, up to [DONE]. Raises HoneError for one that is an error."""
        try:
            for line in reply:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and "error" in event:
                    raise self._refused(0, event)
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from None

    def _take(self, answer: Answer, event: Any, now: float) -> None:
        """Adds what an event has to the answer. Raises AttributeError or TypeError for one in another form than the API's."""
        usage = event.get("usage")
        if usage:
            answer.num_prompt, answer.num_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or thought:
                answer.first_s, answer.last_s = answer.first_s or now, now
            answer.text += text
            answer.thought += thought
            answer.finish = choice.get("finish_reason") or answer.finish

    @staticmethod
    def _fields(given: SamplingParams) -> dict[str, Any]:
        """The fields that were given, in the API's form."""
        values = given.model_dump(mode="json", include=given.model_fields_set - {"max_tokens"})
        form = values.get("structured_outputs")
        if form is not None:
            form = {name: value for name, value in form.items() if value not in (None, False, [], ())}
            if "json_schema" in form:
                form["json"] = form.pop("json_schema")
            values["structured_outputs"] = form
        return values

    def _short(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object that the server answers."""
        with self._open(path, body, _CONNECT_S) as reply:
            try:
                told = json.loads(reply.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._lost(error) from None
        return told if isinstance(told, dict) else {}

    def _open(self, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
        """The reply to a request, its body unread. Raises HoneError for every reply that is no success."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            asked = urllib.request.Request(self._root + path, data, headers)
            return self._opener.open(asked, timeout=seconds)
        except urllib.error.HTTPError as error:
            with error:
                told: Any = {}
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    told = json.loads(error.read())
            raise self._refused(error.code, told) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from None

    def _refused(self, status: int, told: Any) -> HoneError:
        """The error of a server's reply. FitError is the one for a prompt that is too long."""
        error = told.get("error", told) if isinstance(told, dict) else {}
        error = error if isinstance(error, dict) else {"message": str(error)}
        message = str(error.get("message") or f"HTTP status {status}")
        if status == 401:
            return SpecError(f"{self._root}: {message}", fix=f"give --api_key=KEY, or set {API_KEY_VARIABLE}")
        if error.get("code") == "context_length_exceeded" or "context length" in message:
            return FitError(f"{self._root}: {message}", fix="shorten the message, or begin anew with /clear")
        kind = SpecError if 400 <= status < 500 else MachineError
        return kind(f"{self._root}: {message}", fix="correct what it names" if kind is SpecError else "try again")

    def _lost(self, error: Exception | str) -> MachineError:
        reason = getattr(error, "reason", error)
        return MachineError(
            f"{self._root} cannot be reached, or does not answer as OpenAI's API does: {reason}",
            fix="start it (hone serve FOLDER), or correct --url",
        )

    def close(self) -> None:
        """Nothing is kept open."""
