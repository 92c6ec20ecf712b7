"""Bodies in, errors and reply objects out, without a server."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.serve.http.inputs import check_ids, message_dicts, split_prompts
from hone.serve.http.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    parse_body,
)
from hone.serve.http.replies import (
    ChatReply,
    CompletionLogprobs,
    CompletionReply,
    PromptTokens,
    TokenLabels,
    dump,
)
from hone.serve.request import Output, TokenLogprob


def refusal(raw: bytes | dict, kind: type = CompletionBody) -> ApiError:
    """The ApiError that `raw` gives, its sampling parameters included."""
    with pytest.raises(ApiError) as caught:
        body = parse_body(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), kind)
        body.sampling(max_tokens=16, prompt_logprobs=None)
    assert caught.value.status == 400
    assert len(json.dumps(caught.value.body)) < 1500
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nothing",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe{}",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
    ids=range(13),
)
def test_what_is_no_json_object(raw: bytes):
    assert refusal(raw).code == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("min_p", -0.1),
        ("top_k", -2),
        ("seed", 2**80),
        ("seed", "x"),
        ("n", 0),
        ("n", 10_000),
        ("stop", ""),
        ("stop", ["a", 3]),
        ("stop", ["a"] * 1000),
        ("stop", "\ud800"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"] * 100_000),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", [1]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("stream", "maybe"),
        ("stream_options", 7),
        ("priority", 2**40),
        ("model", 5),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_a_wrong_value_names_its_field(field: str, value: object):
    error = refusal({"prompt": "a", field: value})
    assert error.param is not None and error.param.split(".")[0] == field
    assert error.message.startswith(field)


def test_a_number_too_large_for_a_float_is_refused():
    assert refusal(b'{"prompt": "a", "temperature": 1e400}').param == "temperature"


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("suffix", "end", ""),
        ("best_of", 0, None),
        ("prompt_logprobs", 21, None),
        ("guided_json", {}, None),
        ("structural_tag", {}, None),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(field: str, value: object, harmless: object):
    error = refusal({"prompt": "a", field: value})
    assert error.param == field and field in error.message
    body = parse_body(json.dumps({"prompt": "a", field: harmless}).encode(), CompletionBody)
    assert body.unknown == []


@pytest.mark.parametrize(("field", "value"), [("tools", [{}]), ("tool_choice", "maybe"), ("functions", [1])])
def test_chat_refuses_wrong_tools(field: str, value: object):
    assert refusal({"messages": [{"role": "user", "content": "a"}], field: value}, ChatBody).param.startswith(field)


def test_unknown_fields_are_kept_apart_and_known_ones_without_effect_are_not():
    body = parse_body(b'{"prompt": "a", "user": "me", "frobnicate": 1, "guided_json": null}', CompletionBody)
    assert body.unknown == ["frobnicate"]


def test_an_error_is_bounded_whatever_was_sent():
    many = {"prompt": "a", **{f"field{i}": "x" for i in range(100)}, "temperature": "y" * 100_000, "n": "z", "seed": []}
    refusal(many)
    refusal({"prompt": "a", "logit_bias": {"k" * 50_000: 1}})
    refusal({"messages": [{"role": 3}] * 5000}, ChatBody)
    assert refusal(b'{"tokens": [' + b'"a",' * 5000 + b'"b"]}', DetokenizeBody).param == "tokens.0"


def test_sampling_maps_the_names():
    raw = {
        "prompt": "a",
        "top_k": -1,
        "stop": "end",
        "include_stop_str_in_output": True,
        "logit_bias": {"5": -3},
        "seed": 7,
        "logprobs": 2,
        "temperature": None,
    }
    params = parse_body(json.dumps(raw).encode(), CompletionBody).sampling(max_tokens=9, prompt_logprobs=2)
    assert (params.top_k, params.stop, params.include_stop) == (0, ("end",), True)
    assert (params.logit_bias, params.seed, params.logprobs, params.prompt_logprobs) == ({5: -3.0}, 7, 2, 2)
    assert (params.temperature, params.max_tokens) == (1.0, 9)


def test_the_shapes_of_a_prompt():
    assert split_prompts("a", 9) == ["a"]
    assert split_prompts(["a", "b"], 9) == ["a", "b"]
    assert split_prompts([1, 2], 9) == [[1, 2]]
    assert split_prompts([[1], [2]], 9) == [[1], [2]]
    for wrong in (
        None,
        [],
        [[]],
        3,
        [1, "a"],
        ["a", 1],
        [[1], 2],
        [True],
        [1.0],
        {"a": 1},
        [9],
        [-1],
        [10**50],
        [None],
    ):
        with pytest.raises(ApiError) as caught:
            split_prompts(wrong, 9)
        assert caught.value.param.startswith("prompt")
    with pytest.raises(ApiError, match=r"vocabulary has ids 0 to 8"):
        check_ids([9], 9, "prompt")


def test_message_contents():
    raw = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
    ]
    body = parse_body(json.dumps({"messages": raw}).encode(), ChatBody)
    assert message_dicts(body.messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "me"},
    ]
    for content in ([{"type": "image_url", "image_url": {}}], 3, {"a": 1}, [[]], "\ud800"):
        body = parse_body(json.dumps({"messages": [{"role": "user", "content": content}]}).encode(), ChatBody)
        with pytest.raises(ApiError) as caught:
            message_dicts(body.messages)
        assert caught.value.param == "messages.0.content"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "best_of"]) | st.text(),
        json_values,
        max_size=6,
    )
)
def test_any_object_is_a_body_or_an_api_error(values: dict):
    for kind in (CompletionBody, ChatBody):
        try:
            body = parse_body(json.dumps(values).encode("utf8", "replace"), kind)
            body.sampling(max_tokens=1, prompt_logprobs=None)
        except ApiError as error:
            assert error.status == 400
            assert len(dump(error.body)) < 3000


class Bytes:
    """A tokenizer whose token i stands for `texts[i]`."""

    def __init__(self, *texts: bytes) -> None:
        self._texts = texts

    def token_bytes(self, token: int) -> bytes:
        return self._texts[token]


def rows(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0, [(token, -1.0)]) for token in tokens]


def test_text_offsets_point_into_the_text():
    names = Bytes(b"<s>", b"ab", b" c", "é".encode()[:1], "é".encode()[1:], b"\xff", b"d")
    tokens = [0, 1, 2, 3, 4, 5, 6]
    text = b"".join(names.token_bytes(token) for token in tokens[1:]).decode("utf8", "replace")
    got = CompletionLogprobs(TokenLabels(names, as_ids=False), frozenset({0})).lists(tokens, rows(*tokens))
    assert text == "ab cé�d"
    assert got["text_offset"] == [0, 0, 2, 4, 4, 5, 6]
    assert got["tokens"] == ["<s>", "ab", " c", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xff", "d"]
    broken = CompletionLogprobs(TokenLabels(names, as_ids=False), frozenset()).lists([3, 6, 3], rows(3, 6, 3))
    assert broken["text_offset"] == [0, 1, 2]


def test_an_echoed_sentencepiece_prompt_has_no_leading_space():
    names = Bytes(b"<s>", b" once", b" upon")
    writer = CompletionLogprobs(TokenLabels(names, as_ids=False), frozenset({0}))
    writer.start(PromptTokens([0, 1, 2], "once upon"))
    assert writer.lists([0, 1, 2], [None, *rows(1, 2)])["text_offset"] == [0, 0, 4]


def test_namesakes_keep_the_higher_logprob_and_infinity_becomes_json():
    names = Bytes(b"a", b"a", b"b")
    row = TokenLogprob(1, -math.inf, [(0, -0.5), (2, -3.0)])
    got = CompletionLogprobs(TokenLabels(names, as_ids=False), frozenset()).lists([1], [row])
    assert got["top_logprobs"] == [{"a": -0.5, "b": -3.0}]
    assert got["token_logprobs"] == [-9999.0]


def reply_of(kind: type, **body):
    names = Bytes(*(bytes([65 + i]) for i in range(20)))
    parsed = parse_body(json.dumps(body).encode(), ChatBody if kind is ChatReply else CompletionBody)
    more = {"special": frozenset()} if kind is CompletionReply else {}
    return kind(
        parsed,
        labels=TokenLabels(names, as_ids=False),
        reply_id="x-1",
        created=1,
        model="m",
        prompts=[PromptTokens([0, 1], "AB"), PromptTokens([2], "C")][: 1 if kind is ChatReply else 2],
        n=body.get("n", 1),
        **more,
    )


def parse_events(data: bytes) -> list:
    return [
        part if part == b"[DONE]" else json.loads(part)
        for part in (event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event)
    ]


def test_usage_counts_a_prompt_once():
    reply = reply_of(CompletionReply, prompt=["AB", "C"], n=2)
    for choice in reply.choices:
        choice.take(Output("", tokens=[3, 4], text="DE", finish="length", num_cached_tokens=1))
    whole = reply.whole()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 8,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_chat_stream_has_role_content_finish_usage_done():
    reply = reply_of(
        ChatReply,
        messages=[{"role": "user", "content": "a"}],
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    (choice,) = reply.choices
    data = b""
    for output in (
        Output("", tokens=[3], text="D", logprobs=rows(3)),
        Output("", tokens=[4], text="E", logprobs=rows(4), finish="stop", stop_reason="F"),
    ):
        choice.take(output)
        data += reply.events(choice, output)
    *chunks, usage, done = parse_events(data + reply.closing())
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "D"},
        {"content": "E"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2]
    assert chunks[1]["choices"][0]["logprobs"]["content"][0] == {
        "token": "D",
        "logprob": -1.0,
        "bytes": [68],
        "top_logprobs": [{"token": "D", "logprob": -1.0, "bytes": [68]}],
    }
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 4
    assert done == b"[DONE]"


def test_a_streamed_echo_says_the_prompt_once():
    reply = reply_of(CompletionReply, prompt="AB", echo=True, logprobs=1)
    choice = reply.choices[0]
    data = b""
    for output in (
        Output("", tokens=[3], text="D", logprobs=rows(3), prompt_logprobs=[None, *rows(1)]),
        Output("", tokens=[4], text="E", logprobs=rows(4), finish="length"),
    ):
        choice.take(output)
        data += reply.events(choice, output)
    first, second = parse_events(data)
    assert first["choices"][0]["text"] == "ABD" and second["choices"][0]["text"] == "E"
    assert first["choices"][0]["logprobs"]["tokens"] == ["A", "B", "D"]
    assert first["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert second["choices"][0]["logprobs"]["text_offset"] == [3]
