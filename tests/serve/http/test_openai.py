"""Structured output, tools and reasoning through the openai package, whole and streamed, against a random model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.serve.live import LiveServer

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    "<assistant>{% if thinks %}<think>{% endif %}{% if quiet %}<think></think>{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
MODEL = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 300, "temperature": 2.0}
SHORT = {**MODEL, "max_completion_tokens": 30}
"""For replies that nothing ends but the limit."""


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    live = LiveServer(
        tiny_llama,
        served_model_name="tiny",
        chat_template=str(template),
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        reasoning_parser="qwen3",
        engine={"num_pages": 400, "max_num_seqs": 16},
    )
    yield live
    live.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Home(BaseModel):
    city: Literal["Oslo", "Rome"]
    floors: list[Literal[1, 2, 3]]


BOUNDED = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
WITHOUT_BLANKS = {"chat_template_kwargs": {"quiet": True}}


def test_openai_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    schema = {**Home.model_json_schema(), "additionalProperties": False}
    schema["properties"]["floors"]["maxItems"] = 4
    form = {"type": "json_schema", "json_schema": {"name": "home", "schema": schema, "strict": True}}
    for seed in (1, 2):
        reply = client.chat.completions.create(**MODEL, response_format=form, seed=seed, n=2, extra_body=WITHOUT_BLANKS)
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            Home.model_validate_json(choice.message.content)
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            **MODEL, response_format=form, seed=2, stream=True, extra_body=WITHOUT_BLANKS
        )
    )
    assert text == reply.choices[0].message.content
    anything = client.chat.completions.create(
        **SHORT, response_format={"type": "json_object"}, seed=1, extra_body=WITHOUT_BLANKS
    ).choices[0]
    assert anything.message.content.startswith("{")
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content), dict)


def test_completions_take_every_kind(client: openai.OpenAI) -> None:
    kinds = {
        "json": (BOUNDED, None),
        "regex": ("[a-c]{3}[0-9]", "[a-c]{3}[0-9]"),
        "choice": (["left", "right"], "left|right"),
        "grammar": ('start: "(" /x+/ ")"', r"\(x+\)"),
    }
    for kind, (value, pattern) in kinds.items():
        extra = {"structured_outputs": {kind: value, "disable_any_whitespace": True}}
        choice = client.completions.create(
            model="tiny", prompt="the", max_tokens=60, temperature=2.0, seed=3, logprobs=1, extra_body=extra
        ).choices[0]
        if pattern is None:
            jsonschema.validate(json.loads(choice.text), BOUNDED)
        elif choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    bad = client.completions.create(
        model="tiny",
        prompt="the",
        max_tokens=40,
        seed=1,
        extra_body={"bad_words": ["e", "t"], "allowed_token_ids": [*range(60, 90)]},
    ).choices[0]
    assert "e" not in bad.text and "t" not in bad.text


def test_wrong_forms_are_errors_that_name_their_field(client: openai.OpenAI) -> None:
    for field, body in {
        "response_format.json_schema.schema": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}
        },
        "response_format.json_schema": {"response_format": {"type": "json_schema"}},
        "response_format.type": {"response_format": {"type": "xml"}},
        "structured_outputs.regex": {"structured_outputs": {"regex": "(a"}},
        "structured_outputs.json": {"structured_outputs": {"json": "{"}},
        "structured_outputs.grammar": {"structured_outputs": {"grammar": "start: x"}},
        "structured_outputs": {
            "structured_outputs": {"regex": "a", "choice": ["b"]},
            "response_format": {"type": "text"},
        },
        "structured_outputs.jsn": {"structured_outputs": {"jsn": {}}},
        "guided_json": {"guided_json": {}},
        "allowed_token_ids": {"allowed_token_ids": [100000]},
        "tools": {"tools": [TOOLS[0], TOOLS[0]]},
        "tools.0.function.name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tool_choice": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "messages.0.tool_calls": {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]
        },
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=body)
        assert caught.value.param == field, (field, caught.value.message)
    for body in (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=body)


def test_half_a_surrogate_pair_is_an_error_wherever_it_stands(server: LiveServer) -> None:
    half = "\ud800"
    for body in (
        {"structured_outputs": {"json": {"enum": [half]}}},
        {"structured_outputs": {"json": json.dumps({"enum": [half]})}},
        {"structured_outputs": {"regex": half}},
        {"bad_words": [half]},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [half]}}}],
            "tool_choice": "required",
        },
    ):
        sent = json.dumps({"messages": MESSAGES, "max_tokens": 5, **body}).encode()
        reply = server.http.post("/v1/chat/completions", content=sent, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400), (body, reply.text)


def streamed(client: openai.OpenAI, **more: Any) -> dict[str, Any]:
    """A streamed reply put together as clients do: calls by index, arguments joined."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for chunk in client.chat.completions.create(stream=True, **more):
        (choice,) = chunk.choices
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or []:
            call = found["calls"].setdefault(part.index, {"name": "", "arguments": ""})
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
        found["finish"] = choice.finish_reason or found["finish"]
    return found


def check(name: str, arguments: str) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("seed", range(2))
def test_forced_calls(client: openai.OpenAI, seed: int) -> None:
    asked = {**MODEL, "tools": TOOLS, "seed": seed, "extra_body": WITHOUT_BLANKS}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, finish in ((named, "stop"), ("required", "tool_calls")):
        whole = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert whole.finish_reason == finish and len(whole.message.tool_calls) == 1
        parts = streamed(client, **asked, tool_choice=choice, parallel_tool_calls=False)
        (call,) = whole.message.tool_calls
        check(call.function.name, call.function.arguments)
        assert parts["calls"] == {0: {"name": call.function.name, "arguments": call.function.arguments}}
        assert parts["finish"] == finish and not parts["content"] and not whole.message.content


def test_calls_that_the_model_chooses(client: openai.OpenAI) -> None:
    """A regular expression stands for a model that writes Hermes' form."""
    text = 'Look: <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": [2-3]}}\n</tool_call>'
    pattern = text.replace("{", r"\{").replace("}", r"\}").replace("[2-3]", "[2-3]")
    asked = {**MODEL, "seed": 4, "extra_body": {**WITHOUT_BLANKS, "structured_outputs": {"regex": pattern}}}
    plain = client.chat.completions.create(**asked).choices[0]
    assert "<tool_call>" in plain.message.content and plain.message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="one form"):
        client.chat.completions.create(**asked, tools=TOOLS)
    free = client.chat.completions.create(**SHORT, tools=TOOLS, seed=4, extra_body=WITHOUT_BLANKS).choices[0]
    parts = streamed(client, **SHORT, tools=TOOLS, seed=4, extra_body=WITHOUT_BLANKS)
    assert free.message.content == parts["content"] and not parts["calls"]
    off = client.chat.completions.create(**SHORT, tools=TOOLS, tool_choice="none", seed=4, extra_body=WITHOUT_BLANKS)
    assert (
        off.usage.prompt_tokens
        < client.chat.completions.create(
            **SHORT, tools=TOOLS, tool_choice="auto", seed=4, extra_body=WITHOUT_BLANKS
        ).usage.prompt_tokens
    )  # the template shows tools
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    with_call = client.chat.completions.create(**{**MODEL, "messages": history, "max_completion_tokens": 1})
    assert with_call.choices[0].message.content is not None


def test_reasoning_is_kept_apart(client: openai.OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"thinks": True}}
    bias = {"27": 9, "15": 6}  # '<' and '/'
    asked = {**MODEL, "seed": 5, "max_completion_tokens": 60, "extra_body": thinking, "logit_bias": bias}
    whole = client.chat.completions.create(**asked).choices[0]
    parts = streamed(client, **asked)
    message = whole.message
    assert parts["reasoning"] == message.reasoning_content == message.reasoning
    assert parts["content"] == (message.content or "") and message.reasoning_content
    hidden = client.chat.completions.create(
        **{**asked, "extra_body": {**thinking, "include_reasoning": False}}
    ).choices[0]
    assert not hasattr(hidden.message, "reasoning_content") and hidden.message.content == message.content
    quiet = client.chat.completions.create(**{**asked, "extra_body": WITHOUT_BLANKS}).choices[0]
    assert quiet.message.reasoning_content is None and quiet.message.content


def test_prompt_logprobs_and_best_of(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "the quick", "max_tokens": 6, "seed": 2, "temperature": 1.5}
    echoed = client.completions.create(**asked, echo=True, logprobs=3).choices[0].logprobs
    given = client.completions.create(**asked, extra_body={"prompt_logprobs": 3}).choices[0].prompt_logprobs
    chat = client.chat.completions.create(**SHORT, extra_body={"prompt_logprobs": 0})
    assert given[0] is None and len(given) < len(echoed.tokens)
    for place, entries in enumerate(given[1:], 1):
        assert echoed.token_logprobs[place] in [one["logprob"] for one in entries.values()]
        assert [one["rank"] for one in entries.values()][:3] == [1, 2, 3] and 3 <= len(entries) <= 4
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens and len(chat.prompt_logprobs[1]) == 1
    copies = client.completions.create(**asked, n=4, logprobs=0).choices
    means = {one.text: sum(one.logprobs.token_logprobs) / len(one.logprobs.tokens) for one in copies}
    best = client.completions.create(**asked, n=2, extra_body={"best_of": 4}).choices
    assert [one.text for one in best] == sorted(means, key=lambda text: -means[text])[:2] and [
        one.index for one in best
    ] == [0, 1]
    for wrong in ({"best_of": 4, "stream": True}, {"best_of": 1, "n": 2}, {"prompt_logprobs": 1, "stream": True}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**asked, extra_body=wrong)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beam_search_finds_what_an_exhaustive_one_does(client: openai.OpenAI, tiny_llama: Path, penalty: float) -> None:
    """transformers' beam search on the same model."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    prompt = [5, 6, 7, 60]
    wanted = model.generate(
        torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=5, do_sample=False,
        length_penalty=penalty, early_stopping=False, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    extra = {"use_beam_search": True, "length_penalty": penalty, "return_token_ids": True}
    found = client.completions.create(model="tiny", prompt=prompt, n=3, max_tokens=5, extra_body=extra)
    assert [one.token_ids for one in found.choices] == [row[len(prompt) :].tolist() for row in wanted.sequences]
    with pytest.raises(openai.BadRequestError, match="does not take top_p"):
        client.completions.create(model="tiny", prompt=prompt, top_p=0.5, extra_body=extra)


# ---- /v1/responses -------------------------------------------------------------------------------------------------

ASKED = {"model": "tiny", "max_output_tokens": 300, "temperature": 2.0}
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_response_is_the_chat_of_the_same_meaning(client: openai.OpenAI) -> None:
    items = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "be "}, {"type": "input_text", "text": "brief"}],
        },
        {"role": "user", "content": "the quick"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "system"}, {"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]  # fmt: skip
    extra = {**WITHOUT_BLANKS, "seed": 7}
    chat = client.chat.completions.create(
        **{**MODEL, "messages": messages, "max_completion_tokens": 20}, extra_body=extra
    )
    reply = client.responses.create(
        **{**ASKED, "max_output_tokens": 20}, input=items, instructions="system", extra_body=extra
    )
    assert reply.output_text == chat.choices[0].message.content
    assert reply.status == {"length": "incomplete", "stop": "completed"}[chat.choices[0].finish_reason]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


def test_a_streamed_response_builds_up_to_the_whole(client: openai.OpenAI) -> None:
    cases: list[dict[str, Any]] = [
        {"extra_body": {**WITHOUT_BLANKS, "seed": 3}, "max_output_tokens": 12},
        {"extra_body": {"chat_template_kwargs": {"thinks": True}, "seed": 3}, "max_output_tokens": 30},
        {"extra_body": {**WITHOUT_BLANKS, "seed": 3}, "tools": FLAT, "tool_choice": "required"},
        {"extra_body": {**WITHOUT_BLANKS, "seed": 3}, "text": {"format": {"type": "json_schema", "name": "x", "schema": BOUNDED}}},
    ]  # fmt: skip
    for more in cases:
        asked = {**ASKED, "input": "the quick", **more}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = list(stream)  # the client checks that events fit together
        final = events[-1].response
        assert [event.sequence_number for event in events if not event.type.endswith("accumulated")] == sorted(
            event.sequence_number for event in events
        )
        assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")

        def bare(reply: Any) -> list[Any]:
            items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in reply.output]
            for item in items:
                for part in item.get("content") or []:
                    part.pop("parsed", None)
            return items

        assert bare(whole) == bare(final) and whole.status == final.status
    jsonschema.validate(json.loads(whole.output_text), BOUNDED)
    called = client.responses.create(
        **ASKED, input="the", tools=FLAT, tool_choice={"type": "function", "name": "weather"}, extra_body=WITHOUT_BLANKS
    )
    (item,) = called.output
    assert item.type == "function_call"
    check(item.name, item.arguments)


def test_what_responses_do_not_take(client: openai.OpenAI) -> None:
    for param, more in {
        "previous_response_id": {"previous_response_id": "resp_1"},
        "background": {"background": True},
        "input.0": {"input": [{"type": "item_reference", "id": "x"}]},
        "input.0.content": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input": {"input": []},
        "tools.0.type": {"tools": [{"type": "web_search"}]},
        "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "truncation": {"truncation": "auto"},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**ASKED, "input": "a"}, extra_body=more)
        assert caught.value.param == param, caught.value.message
