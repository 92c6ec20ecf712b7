"""A language model behind an OpenAI-compatible endpoint: concurrent requests through the openai client."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from hone.base.errors import HoneError, MissingExtra, SpecError
from hone.base.spec import Spec


class Endpoint(Spec):
    """The address of a language model and how it is queried; hone's own server (`hone serve`) is one."""

    url: str = Field("http://127.0.0.1:8000/v1", description="Base address, up to and with /v1.")
    model: str = Field("", description="Model to request; empty: the first that the endpoint lists.")
    chat: bool = Field(
        True, description="Use /chat/completions; false: /completions, for models without a chat template."
    )
    key_from: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the API key; not set: no key is sent."
    )
    parallel: int = Field(8, ge=1, description="Concurrent requests.")
    attempts: int = Field(
        5,
        ge=1,
        description="Attempts per request; the waits between them double from 0.5 s.",
    )
    timeout_s: float = Field(120.0, gt=0, description="Timeout of a request in seconds.")

    def ask(
        self, questions: Sequence[str], max_tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[str]:
        """The answers to all questions, in order, at temperature 0.

        A temporary refusal (408, 409, 429, 5xx) and a lost connection are retried, after as long as the server
        requests. Raises MissingExtra without openai, HoneError when the endpoint cannot be reached or refuses.
        """
        with self.connected() as (client, headers):

            def one(question: str) -> str:
                how = {"model": model, "temperature": 0, "max_tokens": max_tokens, "extra_headers": headers}
                if self.chat:
                    messages = [{"role": "user", "content": question}]
                    reply = self.call(lambda: client.chat.completions.create(messages=messages, **how))
                else:
                    reply = self.call(lambda: client.completions.create(prompt=question, **how))
                progress(1)
                return self.text_of(reply)

            model = self.model or self._first_model(client, headers)
            with ThreadPoolExecutor(self.parallel) as pool:
                return list(pool.map(one, questions))

    @contextmanager
    def connected(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """(an openai client of this endpoint, the headers of every request). Raises MissingExtra, SpecError."""
        try:
            import openai
        except ImportError:
            raise MissingExtra.of("asking a language model", "openai", "data") from None
        if not self.url.startswith(("http://", "https://")):
            raise SpecError(f"endpoint.url = '{self.url}' is not a web address", fix="write http://HOST:PORT/v1")
        key = os.environ.get(self.key_from, "")
        options = {"max_retries": self.attempts - 1, "timeout": self.timeout_s}
        with openai.OpenAI(base_url=self.url.rstrip("/"), api_key=key or "none", **options) as client:
            yield client, {} if key else {"Authorization": openai.omit}

    def _first_model(self, client: Any, headers: dict[str, Any]) -> str:
        models = self.call(lambda: client.models.list(extra_headers=headers))
        if not getattr(models, "data", None):
            raise HoneError(f"{self.url} lists no model", fix="name one with endpoint.model")
        return models.data[0].id

    def call(self, request: Callable[[], Any]) -> Any:
        """The endpoint's answer to `request`. Raises HoneError with the endpoint's error."""
        import openai

        tried, said = 1, ""
        try:
            return request()
        except openai.APIStatusError as error:
            tried, said = _attempts(error), f"{error.status_code} {error.response.text[:300]}"
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            tried, said = _attempts(error), f"{type(cause).__name__} {cause}"
        except (openai.OpenAIError, ValueError) as error:
            said = f"an answer that is not a JSON object: {error}"
        raise HoneError(
            f"{self.url} gave no answer in {tried} attempts: {said}",
            fix="check endpoint.url, endpoint.model and the key, or that the server runs",
        )

    def text_of(self, reply: Any) -> str:
        """The text of the endpoint's answer. Raises HoneError when it has none."""
        try:
            choice = reply.choices[0]
            text = choice.message.content if self.chat else choice.text
        except (AttributeError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise HoneError(
                f"{self.url} answered without text: {str(reply)[:300]}", fix="check that it speaks OpenAI's protocol"
            )
        return text


def _attempts(error: Any) -> int:
    """Attempts of the request of `error`, which the client counts in a header."""
    return 1 + int(error.request.headers.get("x-stainless-retry-count", 0))
