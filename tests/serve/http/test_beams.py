"""Beam search beside what else a body or a server says. Its texts are checked in test_openai.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hone.serve.http.app import Generation
from hone.serve.http.defaults import GenerationDefaults
from hone.serve.http.endpoints.beam import BeamSearch
from hone.serve.http.prompts import PromptTokens
from hone.serve.http.protocol import ApiError, CompletionBody
from hone.serve.request import Output, Request, Retention, SamplingParams, TokenLogprob

PROMPT = PromptTokens([3, 4, 5])


def generation(**defaults: Any) -> Generation:
    """The endpoint of a server whose model has these defaults of generation."""
    settings = SimpleNamespace(defaults=GenerationDefaults(defaults), parsers=None)
    models, prompts = SimpleNamespace(adapter_of=lambda name: ""), SimpleNamespace(tokenizer=None, vocab_size=61)
    return Generation(SimpleNamespace(settings=settings, prompts=prompts, models=models))  # type: ignore[arg-type]


def body(**fields: Any) -> CompletionBody:
    return CompletionBody(prompt=PROMPT.ids, use_beam_search=True, **fields)


def test_a_models_defaults_of_drawing_are_not_the_clients() -> None:
    """Most chat models have a temperature and top_p in generation_config.json."""
    server = generation(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    request = server._request(body(n=2), PROMPT, 0, 5, False, None)
    assert request.params.top_k == 0
    drawn = server._request(CompletionBody(prompt=PROMPT.ids), PROMPT, 0, 5, False, None)
    assert (drawn.params.top_k, drawn.params.temperature) == (20, 0.6)


@pytest.mark.parametrize(
    "fields", [{"top_k": 20}, {"temperature": 0.6}, {"prompt_logprobs": 0}, {"max_tokens": 0}, {"n": 33}]
)
def test_what_beams_do_not_take_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        generation()._request(body(**fields), PROMPT, 0, fields.get("max_tokens", 5), False, None)
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))


class Scripted:
    """An engine whose next tokens are always 7 and 8; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def submit(self, requests: list[Request], deliver: Callable[[Output], None]) -> None:
        self.asked += requests
        for one in requests:
            top = [(7, -0.1), (8, -2.5)]
            deliver(Output(one.id, [7], logprobs=[TokenLogprob(7, -0.1, top)], finish="length"))

    def abort(self, names: list[str]) -> None:
        pass


def test_every_step_has_the_bodys_priority_salt_and_retention() -> None:
    kept = (Retention(start=0, end=3, priority=90),)
    engine, names = Scripted(), iter("abcdefgh")
    search = BeamSearch(engine, frozenset({8}), lambda: next(names))  # type: ignore[arg-type]
    given = Request("a", [3, 4], SamplingParams(max_tokens=3), 2, "salt", retention=kept, adapter="law")
    beams = asyncio.run(search.search(given, body(n=1)))
    assert [beam.tokens for beam in beams] == [[7, 7, 7]]
    assert [one.prompt for one in engine.asked] == [[3, 4], [3, 4, 7], [3, 4, 7, 7]]
    assert {(one.priority, one.salt, one.retention, one.adapter) for one in engine.asked} == {(2, "salt", kept, "law")}
