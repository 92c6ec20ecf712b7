"""The base of techniques that ask a language model about every document: prompts, limits, cost, and the journal of paid answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from pydantic import Field, model_validator

from hone.base.errors import FitError, HoneError, did_you_mean
from hone.base.figure import Estimate
from hone.base.spec import Circumstance
from hone.base.table import Technique
from hone.feed.mix.endpoint import Endpoint


class Answer(NamedTuple):
    """A model's answer, or why it refused; with the tokens it was charged for."""

    text: str
    refused: str
    tokens_in: int
    tokens_out: int


def key_of(request: dict[str, Any]) -> str:
    """The identity of a request: what is sent, without the address and the key of the endpoint."""
    return hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).hexdigest()


class Journal:
    """Answers by request, appended to a file of JSON lines and synced; memory holds only where each is.

    A last line that a kill cut off is removed. Used by several threads.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._places: dict[str, int] = {}
        self.tokens_in = self.tokens_out = self.loaded = 0
        self._lock = threading.Lock()
        self._file = open(path, "a+b")
        self._file.seek(0)
        place = 0
        for line in self._file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is None:
                break
            self._places[row["key"]] = place
            self.tokens_in += row["tokens_in"]
            self.tokens_out += row["tokens_out"]
            place += len(line)
        self._file.truncate(place)
        self.loaded = len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __getitem__(self, key: str) -> Answer:
        with self._lock:
            self._file.seek(self._places[key])
            row = json.loads(self._file.readline())
        return Answer(row["text"], row["refused"], row["tokens_in"], row["tokens_out"])

    def add(self, key: str, answer: Answer) -> None:
        """Writes an answer; it is on disk when this returns."""
        line = json.dumps({"key": key, **answer._asdict()}, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._places[key] = place
            self.tokens_in += answer.tokens_in
            self.tokens_out += answer.tokens_out

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


_SLOT = re.compile(r"\{(\w+)\}")
_CHARS_A_TOKEN = 3.0
"""For estimates and for what is reserved before an answer: English has four, other languages fewer."""
_COLUMNS = ("text", "id", "source", "group", "kind", "url", "language")
_OF_THE_DOCUMENT = (400, 413, 422)
Name = TypeVar("Name")
"""What a caller calls a document."""

_IN_FLIGHT = 4
"""Questions per concurrent request that wait for an answer or a worker."""


class Asking(Technique):
    """Asks a language model about every document that is left after deduplication.

    Every answer is written to disk before it is used, so a resumed run asks only what has no answer. The API key is read from the
    environment variable `endpoint.key_from` and written nowhere.
    """

    endpoint: Annotated[Endpoint, Circumstance()] = Field(
        Endpoint(), description="Address, key variable, concurrency and retries. Not part of the artifact's identity."
    )
    model: str = Field(min_length=1, description="Model to request.")
    prompt: str = Field(
        min_length=1,
        description="The question, with {text} where the document goes; also {id} {source} {group} {kind} {url} {language}.",
    )
    system: str = Field("", description="System message; none: not sent.")
    answer_tokens: int = Field(512, ge=1, description="Most tokens of an answer.")
    temperature: float = Field(0.0, ge=0, description="Temperature of sampling.")
    price_in: Annotated[float, Circumstance()] = Field(0.0, ge=0, description="Price of a million tokens sent.")
    price_out: Annotated[float, Circumstance()] = Field(0.0, ge=0, description="Price of a million tokens received.")
    max_tokens_total: Annotated[int | None, Circumstance()] = Field(
        None, ge=1, description="Most tokens, sent and received, of all answers together; none: no limit."
    )
    max_cost: Annotated[float | None, Circumstance()] = Field(
        None, gt=0, description="Most cost of all answers together, by price_in and price_out; none: no limit."
    )
    max_failures: Annotated[float, Circumstance()] = Field(
        0.1, ge=0, le=1, description="Largest share of documents without a usable answer; above it the stage fails."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Asking:
        unknown = [name for name in _SLOT.findall(self.prompt) if name not in _COLUMNS]
        if unknown:
            raise ValueError(
                f"prompt has {{{unknown[0]}}}: {did_you_mean(unknown[0], _COLUMNS)}known are {', '.join(_COLUMNS)}"
            )
        if "{text}" not in self.prompt:
            raise ValueError("prompt has no {text}, so that the model would not see the document")
        if self.max_cost is not None and not (self.price_in or self.price_out):
            raise ValueError("max_cost needs price_in and price_out, the prices of a million tokens")
        return self

    def request(self, document: dict[str, Any]) -> dict[str, Any]:
        """What is sent for a document (its columns with `text`)."""
        question = _SLOT.sub(lambda found: str(document.get(found[1]) or ""), self.prompt)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": question}],
            "max_tokens": self.answer_tokens,
            "temperature": self.temperature,
            **self.more(),
        }

    def more(self) -> dict[str, Any]:
        """Further fields of a request."""
        return {}

    def asks(self, size: int) -> bool:
        """Whether a document of `size` bytes is asked about."""
        return True

    def cost(self, tokens_in: float, tokens_out: float) -> float:
        """The price of these tokens."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6

    def estimates(self, sizes: np.ndarray, weights: np.ndarray) -> dict[str, Estimate]:
        """Tokens and cost of documents of `sizes` bytes (float [n]), each standing for `weights` (float [n]) of the input.

        Bounds from above on what is received: every answer as long as answer_tokens.
        """
        asked = weights * np.array([self.asks(int(size)) for size in sizes], bool)
        sent = float((asked * ((sizes + len(self.prompt) + len(self.system)) / _CHARS_A_TOKEN)).sum())
        received = float(asked.sum() * self.answer_tokens)
        formula = f"{asked.sum():.0f} documents x (prompt / {_CHARS_A_TOKEN:g} bytes a token, answer_tokens = {self.answer_tokens})"
        made = {"llm_tokens": Estimate(value=sent + received, unit="tokens", formula=formula, bound=True)}
        if self.price_in or self.price_out:
            made["llm_cost"] = Estimate(
                value=self.cost(sent, received), unit="1", formula=f"{formula} x prices", bound=True
            )
        return made


class Asked:
    """Runs the questions of one technique, with the journal of their answers and the limits of their cost."""

    def __init__(self, spec: Asking, path: Path) -> None:
        self.spec = spec
        self.journal = Journal(path)

    def answers(self, requests: Iterator[tuple[Name, dict[str, Any]]]) -> Iterator[tuple[Name, Answer]]:
        """(name, answer) of every (name, request), in any order. Equal requests are asked once.

        `requests` is read as far as there is room to ask, so names may come from shards that are read meanwhile.

        Raises FitError before a limit would be exceeded, HoneError when the endpoint refuses for another reason than the document.
        """
        twins: dict[str, list[Name]] = {}
        waiting: dict[Future, tuple[str, float]] = {}
        most = _IN_FLIGHT * self.spec.endpoint.parallel
        with opened(self.spec.endpoint) as ask, ThreadPoolExecutor(self.spec.endpoint.parallel) as pool:
            try:
                for index, request in requests:
                    key = key_of(request)
                    if key in self.journal:
                        yield index, self.journal[key]
                        continue
                    if key in twins:
                        twins[key].append(index)
                        continue
                    sent = sum(len(one["content"].encode()) for one in request["messages"]) / _CHARS_A_TOKEN
                    while len(waiting) >= most or (waiting and not self._fits(sent, waiting)):
                        yield from self._taken(waiting, twins)
                    if not self._fits(sent, waiting):
                        raise self._spent()
                    twins[key] = [index]
                    waiting[pool.submit(self._one, ask, key, request)] = key, sent
                while waiting:
                    yield from self._taken(waiting, twins)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # what is under way is paid: it is written before this returns
                raise

    def _one(self, ask: Any, key: str, request: dict[str, Any]) -> Answer:
        answer = ask(request)
        if not answer.refused:  # a refusal costs nothing, and another server may answer
            self.journal.add(key, answer)
        return answer

    def _taken(self, waiting: dict[Future, Any], twins: dict[str, list[Name]]) -> Iterator[tuple[Name, Answer]]:
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            key, _ = waiting.pop(future)
            answer = future.result()
            for index in twins.pop(key):
                yield index, answer

    def _fits(self, sent: float, waiting: dict[Future, tuple[str, float]]) -> bool:
        """Whether another question of `sent` tokens stays within the limits, when all that wait take as long as they may."""
        spec = self.spec
        tokens_in = self.journal.tokens_in + sent + sum(size for _, size in waiting.values())
        tokens_out = self.journal.tokens_out + spec.answer_tokens * (len(waiting) + 1)
        if spec.max_tokens_total is not None and tokens_in + tokens_out > spec.max_tokens_total:
            return False
        return spec.max_cost is None or spec.cost(tokens_in, tokens_out) <= spec.max_cost

    def _spent(self) -> HoneError:
        journal, spec = self.journal, self.spec
        cost = spec.cost(journal.tokens_in, journal.tokens_out)
        limits = {"max_tokens_total": spec.max_tokens_total, "max_cost": spec.max_cost}
        limit = " or ".join(f"{name} = {value:g}" for name, value in limits.items() if value is not None)
        return FitError(
            f"annotation '{spec.kind}' stopped before {limit}: {journal.tokens_in + journal.tokens_out} tokens in "
            f"{len(journal._places)} answers, cost {cost:.4g}",
            fix="raise the limit and run the same command again: what is answered is not asked again",
        )

    def figures(self, failed: int) -> dict[str, Any]:
        """Counts for stats.json."""
        journal = self.journal
        return {
            "answers": len(journal._places),
            "answers_from_before": journal.loaded,
            "tokens_in": journal.tokens_in,
            "tokens_out": journal.tokens_out,
            "cost": self.spec.cost(journal.tokens_in, journal.tokens_out),
            "failed": failed,
        }


def need_few(spec: Asking, failed: int, asked: int, example: str) -> None:
    """Raises HoneError when too large a share of documents has no usable answer."""
    if failed > spec.max_failures * asked:
        raise HoneError(
            f"annotation '{spec.kind}': {failed} of {asked} documents have no usable answer; one: {example[:200]!r}",
            fix="change the prompt or the model, raise answer_tokens (for a model that thinks first), or raise max_failures",
        )


@contextmanager
def opened(endpoint: Endpoint) -> Iterator[Callable[[dict[str, Any]], Answer]]:
    """A function that sends a request and waits for its answer; temporary refusals are retried (`Endpoint`).

    A refusal of this one request (400, 413, 422: too long, or against the provider's rules) is an answer; others raise HoneError.
    """
    with endpoint.connected() as (client, headers):
        import openai

        def ask(request: dict[str, Any]) -> Answer:
            def send() -> Any:
                try:
                    return client.chat.completions.create(**request, extra_headers=headers)
                except openai.APIStatusError as error:
                    if error.status_code not in _OF_THE_DOCUMENT:
                        raise
                    return f"{error.status_code} {error.response.text[:300]}"

            reply = endpoint.call(send)
            if isinstance(reply, str):
                return Answer("", reply, 0, 0)
            text, usage = endpoint.text_of(reply), reply.usage
            sent = sum(len(one["content"].encode()) for one in request["messages"])
            return Answer(
                text,
                "",
                usage.prompt_tokens if usage else int(sent / _CHARS_A_TOKEN),
                usage.completion_tokens if usage else int(len(text.encode()) / _CHARS_A_TOKEN),
            )

        yield ask
