"""A language model behind an OpenAI-compatible endpoint: one question, one answer, with retries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field

from hone.base.errors import HoneError, MissingExtra, SpecError
from hone.base.spec import Spec

_AGAIN = {408, 409, 429, 500, 502, 503, 504}


class Endpoint(Spec):
    """Where the model answers and how it is asked; hone's own server (`hone serve`) is one."""

    url: str = Field("http://127.0.0.1:8000/v1", description="Base address, up to and with /v1.")
    model: str = Field("", description="Model to ask for; empty: the first that the endpoint lists.")
    chat: bool = Field(
        True, description="Ask /chat/completions; false: /completions, for models without a chat template."
    )
    key_from: str = Field("OPENAI_API_KEY", description="Environment variable with the key; absent: none is sent.")
    parallel: int = Field(8, ge=1, description="Questions asked at a time.")
    attempts: int = Field(5, ge=1, description="Times a question is asked before its failure is final.")
    wait_s: float = Field(
        0.5, ge=0, description="Seconds before the second attempt, twice as long before each later one."
    )
    timeout_s: float = Field(120.0, gt=0, description="Seconds to wait for an answer.")

    def ask(
        self, questions: Sequence[str], max_tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[str]:
        """The answer to each question, in order, at temperature 0.

        Raises MissingExtra without httpx, HoneError when the endpoint cannot be reached or refuses.
        """
        try:
            import httpx
        except ImportError:
            raise MissingExtra.of("asking a language model", "httpx", "data") from None
        if not self.url.startswith(("http://", "https://")):
            raise SpecError(f"endpoint.url = '{self.url}' is no web address", fix="write http://HOST:PORT/v1")
        key = os.environ.get(self.key_from, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=self.url.rstrip("/"), headers=headers, timeout=self.timeout_s) as client:
            model = self.model or self._first_model(client)

            def one(question: str) -> str:
                body = {"model": model, "temperature": 0, "max_tokens": max_tokens}
                if self.chat:
                    body["messages"] = [{"role": "user", "content": question}]
                    reply = self._call(client, "POST", "/chat/completions", body)
                else:
                    body["prompt"] = question
                    reply = self._call(client, "POST", "/completions", body)
                progress(1)
                return self._text(reply)

            with ThreadPoolExecutor(self.parallel) as pool:
                return list(pool.map(one, questions))

    def _first_model(self, client: Any) -> str:
        rows = self._call(client, "GET", "/models", None).get("data")
        if not rows:
            raise HoneError(f"{self.url} lists no model", fix="name one with endpoint.model")
        return rows[0]["id"]

    def _call(self, client: Any, verb: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON answer; an answer that says 'later', or none, is asked for again."""
        import httpx

        said = ""
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.wait_s * 2 ** (attempt - 1))
            try:
                reply = client.request(verb, path, json=body)
            except httpx.TransportError as error:
                said = f"{type(error).__name__} {error}"
                continue
            if reply.status_code == 200:
                try:
                    found = reply.json()
                except ValueError:
                    found = None
                if isinstance(found, dict):
                    return found
                said = f"an answer that is no JSON object: {reply.text[:200]!r}"
                continue
            said = f"{reply.status_code} {reply.text[:300]}"
            if reply.status_code not in _AGAIN:
                break
        raise HoneError(
            f"{self.url}{path} gave no answer in {attempt + 1} attempts: {said}",
            fix="check endpoint.url, endpoint.model and the key, or that the server runs",
        )

    def _text(self, reply: dict[str, Any]) -> str:
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise HoneError(
                f"{self.url} answered without a text: {str(reply)[:300]}", fix="check that it speaks OpenAI's protocol"
            )
        return text
