"""Bodies drawn from the schemas of /openapi.json, for every endpoint: no 5xx, and every error has the documented form."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.model import hf
from hone.serve.http.endpoints.openapi import BODIES, STATE, description
from tests.serve.adapters.folders import adapter_folder
from tests.serve.live import LiveServer

DOCUMENT = description("0")
SCHEMAS = DOCUMENT["components"]["schemas"]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the quick", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/load_lora_adapter": {"lora_name": "drawn", "lora_path": "", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "drawn"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
"""A short valid body of every endpoint that reads one; drawn fields are added to it."""
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64, -(10**40), 10**40]), st.floats(),
    st.sampled_from([0.5, -0.5, 1e308, 1e-300]), st.text(max_size=8), st.sampled_from(["\ud800", "\x00", "a" * 3000, "{{ 7*7 }}"]),
    st.recursive(st.one_of(st.none(), st.integers(-2, 70), st.text(max_size=3)),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6),
)  # fmt: skip
"""Values that mostly do not belong where they are put."""


def values(schema: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    """Values of a JSON schema of the document, as far as it says; what it leaves open is odd."""
    if not isinstance(schema, dict) or depth < 0:
        return ODD
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth - 1)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return st.one_of(*(values(one, depth) for one in schema[word]))
    if "const" in schema or "enum" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    match schema.get("type"):
        case "integer":
            return st.integers(*(None if one is None else int(one) for one in (low, high if high is not None else 40)))
        case "number":
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "string":
            return st.text(max_size=12)
        case "array":
            return st.lists(values(schema.get("items"), depth - 1), max_size=3)
        case "object" if "properties" in schema:
            fields = {name: values(one, depth - 1) for name, one in schema["properties"].items()}
            needed = {name: one for name, one in fields.items() if name in schema.get("required", ())}
            return st.fixed_dictionaries(
                needed, optional={name: one for name, one in fields.items() if name not in needed}
            )
        case "object":
            return st.dictionaries(
                st.text(max_size=5), values(schema.get("additionalProperties"), depth - 1), max_size=3
            )
    return ODD


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """The short valid body with up to four fields of the schema: as it describes them, or anything."""
    fields = SCHEMAS[BODIES[path].__name__]["properties"]
    each = {name: st.one_of(values(one), values(one), ODD) for name, one in fields.items()}
    drawn = st.lists(st.sampled_from(sorted(each)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: each[name] for name in names})
    )
    missing = st.sampled_from([*LEAST[path], None, None, None])
    return st.builds(
        lambda more, gone: {name: value for name, value in (LEAST[path] | more).items() if name != gone or name in more},
        drawn, missing,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = adapter_folder(tmp_path_factory.mktemp("adapter") / "drawn", hf.load(tiny_llama), 0, rank=2)
    LEAST["/v1/load_lora_adapter"]["lora_path"] = str(folder)
    lora = {"max_loras": 1, "allow_runtime_lora_updating": True}
    sizes = {"num_pages": 256, "max_num_seqs": 8, "max_model_len": 128, "lora": lora}
    live = LiveServer(
        tiny_llama, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3", max_queue=64, engine=sizes
    )  # fmt: skip
    yield live
    live.stop()


def checked(reply: httpx.Response, sent: Any) -> None:
    """No 5xx, also not in the middle of a stream, and errors as the document describes them."""
    assert reply.status_code < 500, (sent, reply.status_code, reply.text[:500])
    if reply.status_code >= 400:
        jsonschema.validate(reply.json(), SCHEMAS["Error"])
    elif "event-stream" in reply.headers.get("content-type", ""):
        for line in reply.text.splitlines():
            assert '"server_error"' not in line, (sent, line[:500])


def attack(server: LiveServer, path: str, examples: int) -> dict[int, int]:
    counts: dict[int, int] = {}

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(bodies(path))
    def run(body: dict[str, Any]) -> None:
        raw = json.dumps(body, allow_nan=True).encode()
        if path == "/v1/unload_lora_adapter":
            assert server.post("/v1/load_lora_adapter", **LEAST["/v1/load_lora_adapter"]).status_code == 200
        reply = server.http.post(path, content=raw, headers={"content-type": "application/json"})
        counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
        checked(reply, raw[:800])

    run()
    good, bad = counts[200], sum(counts.values()) - counts[200]
    assert good >= examples // 40 and bad > examples // 20, counts  # both sides of the checks
    return counts


def test_every_endpoint_is_drawn_from():
    assert set(LEAST) == set(BODIES) and set(DOCUMENT["paths"]) == set(BODIES) | set(STATE)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_bodies_of_the_document(server: LiveServer, path: str):
    attack(server, path, 25)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(BODIES))
def test_many_bodies_of_the_document(server: LiveServer, path: str):
    attack(server, path, 150)
    server.wait_for("hone:requests_outstanding", 0)
    server.wait_for("hone:pages_used", 0)
    assert server.http.get("/health").json()["status"] == "ok" and "Traceback" not in server.errors()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_stream_ends_once(server: LiveServer, path: str):
    """The bytes of a streamed reply have one end: those of a second one would be read as the connection's next reply."""
    body = json.dumps(LEAST[path] | {"stream": True}).encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        found = b""
        while b"\r\n0\r\n\r\n" not in found:
            found += sock.recv(65536)
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while data := sock.recv(65536):
            found += data
    first, _, second = found.partition(b"\r\n0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200") and second.startswith(b"HTTP/1.1 200"), second[:60]


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*BODIES, *STATE]),
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]),
    st.text(st.characters(codec="utf8", exclude_categories=["Cc"]), max_size=8),
    st.sampled_from(["application/json", "text/plain", "multipart/form-data; boundary=x", "\x7f"]),
)
def test_paths_methods_and_queries(server: LiveServer, path: str, method: str, text: str, kind: str):
    url = httpx.URL(server.url).copy_with(path=path.replace("{name}", quote(text or "a", safe="")), params={"q": text})
    reply = server.http.request(method, url, content=text.encode(), headers={"content-type": kind})
    assert reply.status_code < 500, (method, url, reply.text[:300])
    if reply.status_code >= 400 and method != "HEAD":
        jsonschema.validate(reply.json(), SCHEMAS["Error"])
