"""The endpoints over a live server with a small real model: shapes, limits, errors, and a fuzz."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hone.base.errors import MachineError
from hone.serve.http.server import listen
from tests.serve.live import LiveServer

CHAT = [{"role": "user", "content": "the quick brown"}]


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[LiveServer]:
    live = LiveServer(tiny_llama, anew=True, served_model_name="tiny", metrics_prefix="vllm", max_body_bytes=200_000)
    yield live
    live.stop()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_state_endpoints(server: LiveServer):
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert server.http.get("/v1/models/tiny").json()["max_model_len"] == 512
    error_of(server.http.get("/v1/models/other"), 404)
    assert server.http.get("/health").json()["status"] == "ok"
    assert set(server.http.get("/version").json()) == {"version"}
    assert server.http.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"


def test_metrics_have_two_names(server: LiveServer):
    server.post("/v1/completions", prompt="the", max_tokens=3)
    text = server.http.get("/metrics").text
    for name in ("time_to_first_token_seconds_count", "generation_tokens_total", "num_requests_running"):
        assert f"\nhone:{name}{{" in text and f"\nvllm:{name}{{" in text
    assert server.metric("hone:steps_total") > 0


def test_wrong_routes_have_the_error_form(server: LiveServer):
    assert "no such endpoint" in error_of(server.http.get("/v2/nothing"), 404)["message"]
    error_of(server.http.get("/v1/completions"), 405)


def test_tokenize_and_back(server: LiveServer):
    got = server.post("/tokenize", prompt="the quick é", return_token_strs=True).json()
    assert got["count"] == len(got["tokens"]) == len(got["token_strs"]) and got["max_model_len"] == 512
    assert server.post("/detokenize", tokens=got["tokens"]).json() == {"prompt": "the quick é"}
    chat = server.post("/tokenize", messages=CHAT).json()
    assert server.post("/detokenize", tokens=chat["tokens"]).json()["prompt"] == "<user>the quick brown\n<assistant>"
    for body in ({}, {"prompt": "a", "messages": CHAT}):
        error_of(server.post("/tokenize", **body))
    error_of(server.post("/detokenize", tokens=[100_000]))
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_every_shape_of_prompt_gives_the_same_text(server: LiveServer):
    ids = server.post("/tokenize", prompt="the quick").json()["tokens"]
    texts = set()
    for prompt in ("the quick", ["the quick"], ids, [ids]):
        reply = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=8).json()
        assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
        texts.add(reply["choices"][0]["text"])
    assert len(texts) == 1
    two = server.post("/v1/completions", prompt=["the quick", "lazy dog"], n=2, temperature=0, max_tokens=8).json()
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]
    assert two["choices"][0]["text"] == two["choices"][1]["text"] == texts.pop()


@pytest.mark.slow
def test_defaults_of_max_tokens(server: LiveServer):
    reply = server.post("/v1/completions", prompt="the", ignore_eos=True).json()
    assert reply["usage"]["completion_tokens"] == 16
    chat = server.post("/v1/chat/completions", messages=CHAT, ignore_eos=True).json()
    assert chat["usage"]["total_tokens"] == 512 and chat["choices"][0]["finish_reason"] == "length"
    short = server.post("/v1/chat/completions", messages=CHAT, max_tokens=9, max_completion_tokens=2, ignore_eos=True)
    assert short.json()["usage"]["completion_tokens"] == 2


def test_too_long_states_the_limit(server: LiveServer):
    for prompt, more in (([5] * 600, {}), ([5] * 512, {}), ([5] * 500, {"max_tokens": 13})):
        error = error_of(server.post("/v1/completions", prompt=prompt, **more))
        assert "maximum context length is 512 tokens" in error["message"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("max_tokens" if more else "prompt")
    error = error_of(server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 600}]))
    assert error["param"] == "messages"
    assert server.post("/v1/completions", prompt=[5] * 510, ignore_eos=True).json()["usage"]["completion_tokens"] == 2
    cut = server.post("/v1/completions", prompt=[5] * 600, truncate_prompt_tokens=100, max_tokens=1).json()
    assert cut["usage"]["prompt_tokens"] == 100


def test_tokens_out_of_vocabulary(server: LiveServer):
    assert error_of(server.post("/v1/completions", prompt=[5, 320]))["param"] == "prompt"
    assert error_of(server.post("/v1/completions", prompt="a", stop_token_ids=[999]))["param"] == "stop_token_ids"
    assert error_of(server.post("/v1/completions", prompt="a", logit_bias={"999": 1}))["param"] == "logit_bias"
    error_of(server.post("/v1/completions", prompt=""))


def test_echo_with_logprobs(server: LiveServer):
    ids = server.post("/tokenize", prompt="the quick brown fox").json()["tokens"]
    body = {"prompt": [ids], "echo": True, "logprobs": 2, "temperature": 0, "seed": 1234}
    choice = server.post("/v1/completions", max_tokens=1, **body).json()["choices"][0]
    got = choice["logprobs"]
    assert {len(got[name]) for name in got} == {len(ids) + 1}
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    assert got["token_logprobs"][-1] == max(got["top_logprobs"][-1].values())  # greedy, to the last bit
    for token, logprob, top in list(zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True))[1:]:
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
    assert choice["text"].startswith("the quick brown fox")
    for place, (offset, token) in enumerate(zip(got["text_offset"][:-1], got["tokens"][:-1], strict=True)):
        assert choice["text"][offset : got["text_offset"][place + 1]] == token
    scored = server.post("/v1/completions", max_tokens=0, **body).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"] == got["token_logprobs"][:-1]
    assert scored["text"] == "the quick brown fox" and scored["finish_reason"] == "length"


def test_logit_bias_stop_and_min_tokens(server: LiveServer):
    ids = server.post("/tokenize", prompt="abc").json()["tokens"]
    a, b = ids[0], ids[1]
    forced = server.post("/v1/completions", prompt="x", logit_bias={str(a): 100}, max_tokens=4, return_token_ids=True)
    assert forced.json()["choices"][0]["token_ids"] == [a] * 4
    stopped = server.post(
        "/v1/completions", prompt="x", logit_bias={str(a): 100}, max_tokens=9, stop=["aaa"], temperature=0
    ).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", "aaa")
    kept = server.post(
        "/v1/completions",
        prompt="x",
        logit_bias={str(a): 100},
        max_tokens=9,
        stop="aa",
        include_stop_str_in_output=True,
    ).json()["choices"][0]
    assert kept["text"] == "aa"
    by_id = server.post("/v1/completions", prompt="x", logit_bias={str(b): 100}, stop_token_ids=[b], min_tokens=3)
    assert by_id.json()["usage"]["completion_tokens"] == 4 and by_id.json()["choices"][0]["stop_reason"] == b


def test_seeds(server: LiveServer):
    def texts(**more: Any) -> list[str]:
        body = {"prompt": "the", "max_tokens": 12, "temperature": 1.5, **more}
        return [choice["text"] for choice in server.post("/v1/completions", **body).json()["choices"]]

    assert texts(seed=5) == texts(seed=5) != texts(seed=6)
    three = texts(seed=5, n=3)
    assert three[0] == texts(seed=5)[0] and three[1] == texts(seed=6)[0]
    assert len(set(texts(n=3))) > 1


def test_continue_final_message(server: LiveServer):
    messages = [*CHAT, {"role": "assistant", "content": "fox jumps "}]
    got = server.post("/tokenize", messages=messages, continue_final_message=True).json()
    text = server.post("/detokenize", tokens=got["tokens"]).json()["prompt"]
    assert text == "<user>the quick brown\n<assistant>fox jumps"
    error_of(server.post("/v1/chat/completions", messages=CHAT, chat_template_kwargs={"messages": []}))
    ok = server.post("/v1/chat/completions", messages=CHAT, chat_template_kwargs={"x": 1}, max_tokens=1)
    assert ok.status_code == 200


def test_names_ids_and_warnings(server: LiveServer):
    error = error_of(server.post("/v1/completions", prompt="a", model="other"), 404)
    assert error["code"] == "model_not_found" and "tiny" in error["message"]
    reply = server.http.post(
        "/v1/completions",
        json={"prompt": "a", "model": "tiny", "max_tokens": 1, "frobnicate": 1, "x\nset-cookie: a": 1},
        headers={"x-request-id": "mine-1"},
    )
    assert reply.headers["x-request-id"] == "mine-1" and reply.json()["id"] == "cmpl-mine-1"
    assert reply.headers["x-hone-ignored-fields"] == "frobnicate, x?set-cookie??a"
    odd = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "a b" * 100})
    assert odd.headers["x-request-id"].isalnum()
    field = server.post("/v1/completions", prompt="a", max_tokens=1, request_id="theirs")
    assert field.json()["id"] == "cmpl-theirs"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "repetition_penalty": 1.0, "logprobs": None, "ignore_eos": True, "temperature": 0.0},
        {"prompt": "a", "stop": None, "max_completion_tokens": None, "user": "me", "seed": None, "best_of": None},
    ],
    ids=["as vllm bench sends", "as guidellm sends"],
)
def test_load_generators(server: LiveServer, body: dict[str, Any]):
    body |= {"model": "tiny", "max_tokens": 5, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "x-hone-ignored-fields" not in response.headers
    assert lines.pop() == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] <= 5
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]


def test_bodies_of_a_wrong_type_or_size_are_refused(server: LiveServer):
    def send(content: bytes, content_type: str = "application/json", path: str = "/v1/completions") -> httpx.Response:
        return server.http.post(path, content=content, headers={"content-type": content_type})

    error_of(send(b'{"prompt": "a"}', "text/plain"), 415)
    error_of(send(b"prompt=a", "application/x-www-form-urlencoded"), 415)
    error_of(send(b'{"prompt": "' + b"a" * 300_000 + b'"}'), 413)
    error_of(send(b"{" * 50_000))
    error_of(send(b"\xff"))
    error_of(send(b""))
    error_of(send(b'{"messages": 7}', path="/v1/chat/completions"))
    assert send(b'{"prompt": "a", "max_tokens": 1}', "application/json; charset=utf-8").status_code == 200
    assert len(send(b'{"messages": [' + b'{"role": 1},' * 5000 + b"{}]}", path="/v1/chat/completions").content) < 1000


def test_a_client_that_leaves_in_the_middle_of_its_body(server: LiveServer):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in server.errors()


@pytest.mark.slow
def test_api_key_and_chat_template_file(tiny_llama: Path, tmp_path: Path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    server = LiveServer(tiny_llama, api_key="secret", chat_template=str(template))
    try:
        error_of(server.post("/v1/completions", prompt="a"), 401)
        error_of(server.http.get("/v1/models", headers={"authorization": "Bearer wrong"}), 401)
        error_of(server.post("/tokenize", prompt="a"), 401)
        for open_path in ("/health", "/metrics", "/version"):
            assert server.http.get(open_path).status_code == 200
        server.http.headers["authorization"] = "Bearer secret"
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
        got = server.post("/tokenize", messages=CHAT).json()
        assert server.post("/detokenize", tokens=got["tokens"]).json()["prompt"] == "[the quick brown]"
        assert "secret" not in server.errors() + server.line
    finally:
        server.stop()


def test_a_taken_port_is_a_machine_error():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            listen("127.0.0.1", port)
        assert f"--port={port + 1}" in caught.value.fix
    with pytest.raises(MachineError):
        listen("no.such.host.invalid", 0)


# ---- fuzz ----------------------------------------------------------------------------------------------------------

VALID = {
    "/v1/completions": {
        "prompt": "the quick",
        "max_tokens": 2,
        "temperature": 0.5,
        "n": 1,
        "echo": False,
        "logprobs": 1,
        "stop": ["x"],
        "seed": 1,
        "logit_bias": {"5": 1},
        "stream": False,
        "stream_options": {"include_usage": True},
        "truncate_prompt_tokens": 5,
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ],
        "max_tokens": 2,
        "top_logprobs": 1,
        "logprobs": True,
        "chat_template_kwargs": {"a": 1},
        "continue_final_message": False,
        "min_p": 0.1,
        "top_k": 3,
    },
    "/tokenize": {"prompt": "the quick", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
ODD = [
    None, True, False, 0, -1, 1, 2, 10**6, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.5, -0.5, 1e308, -1e308, 1e-300,
    "", "a", "\ud800", "\x00", "\u202e", "e\u0301", "a" * 3000, "{{ 7*7 }}", "{% for x in range(10) %}", "../../etc/passwd",
    [], [[]], [[[]]], {}, {"a": {}}, [None], [""], ["a", 1], [1, "a"], [1.5], [-1], [10**30], [5] * 600, [[5], []],
    [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "\ud800", "content": "x"}], {"include_usage": 3},
    {"type": "json_object"}, [{"type": "text"}], {"": 1}, {"5": "x"}, {"-5": 1}, {"99999": 1}, {"\ud800": 1},
]  # fmt: skip


def mutate(generator: random.Random) -> tuple[str, bytes, str]:
    """One malformed or odd request: path, body, content type."""
    path = generator.choice(list(VALID))
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(generator.randint(1, 3)):
        name = generator.choice(
            [*body, "frobnicate", "tools", "best_of", "priority", "min_tokens", "top_p", "cache_salt"]
        )
        if generator.random() < 0.15:
            body.pop(name, None)
        elif name == "messages" and generator.random() < 0.7 and isinstance(body.get("messages"), list):
            message = generator.choice(body["messages"] or [{}])
            if isinstance(message, dict):
                message[generator.choice(["role", "content", "name", "tool_calls"])] = generator.choice(ODD)
        else:
            body[name] = generator.choice(ODD)
    if path.startswith("/v1") and "max_tokens" not in body:
        body["max_tokens"] = 2  # the default of a chat is the rest of the context: valid, and slow
    raw = json.dumps(body).encode()
    kind = "application/json"
    dice = generator.random()
    if dice < 0.08:
        raw = raw[: generator.randrange(len(raw))]
    elif dice < 0.16:
        place = generator.randrange(len(raw))
        raw = raw[:place] + bytes([generator.randrange(256)]) + raw[place + 1 :]
    elif dice < 0.20:
        raw = raw.replace(b":", generator.choice([b': NaN, "a":', b': -Infinity, "b":', b":[", b': 1e999, "c":']), 1)
    elif dice < 0.22:
        kind = generator.choice(["text/plain", "multipart/form-data", "", "application/json;;", "\x7f"])
    elif dice < 0.24:
        raw = generator.choice(
            [b"[" * 20_000, b'{"a":' * 5000, b"\x00" * 50, b'"x"', b"[1]", b"1" * 5000, b"\xef\xbb\xbf{}"]
        )
    return path, raw, kind


@pytest.mark.slow
def test_no_malformed_request_gets_a_5xx(server: LiveServer):
    generator = random.Random(20261121)
    requests = [mutate(generator) for _ in range(800)]
    counts: dict[int, int] = {}

    async def one(client: httpx.AsyncClient, limit: asyncio.Semaphore, path: str, raw: bytes, kind: str) -> None:
        async with limit:
            response = await client.post(path, content=raw, headers={"content-type": kind})
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        assert response.status_code < 500, (path, raw[:300], response.text[:300])
        if response.status_code != 200:
            assert len(response.content) < 2000
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    async def main() -> None:
        limit = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await asyncio.gather(*(one(client, limit, *request) for request in requests))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # pytest plugins may own this thread's event loop
        pool.submit(asyncio.run, main()).result()
    assert sum(counts.values()) == 800
    assert counts[400] > 320 and counts[200] > 40, counts  # the generator reaches both sides of the checks
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in server.errors()
    server.wait_for("hone:requests_outstanding", 0)
    server.wait_for("hone:pages_used", 0)
