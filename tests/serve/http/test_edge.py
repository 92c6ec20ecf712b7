"""What operators and networks do to the front: names, keys, slow and many connections, pages, TLS, shutdown."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hone.base.errors import ArtifactError, SpecError
from hone.serve.http import ServerSpec
from hone.serve.http.defaults import generation_defaults
from hone.serve.http.endpoints.openapi import description
from hone.serve.http.protocol import ApiError, ChatBody, CompletionBody, parse_body
from tests.serve.live import LiveServer

FAKE = "tests.serve.fake_engine:build"
KEY = "schlüssel-日本"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edge")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    live = LiveServer(
        folder,
        FAKE,
        api_key=KEY,
        served_model_name=["first", "second"],
        allowed_origins=["https://page.example"],
        limits={"head_s": 2.0, "body_s": 2.0, "max_connections": 20},  # a busy client sends its own within that
    )
    reconnect(live)
    yield live
    live.stop()


def reconnect(server: LiveServer) -> None:
    """A client without open connections that sends the key."""
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=60, headers=[(b"authorization", f"Bearer {KEY}".encode())])


def opened(server: LiveServer, data: bytes) -> socket.socket:
    host, port = re.fullmatch(r"https?://([\w.]+):(\d+)", server.url).groups()
    sock = socket.create_connection((host, int(port)), timeout=15)  # less than the server's usual 20 s for a head
    sock.sendall(data)
    return sock


def answer(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while data := sock.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    sock.close()
    return found


def post(path: str = "/v1/completions", length: int = 1000) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return head.encode() + b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n"


def test_names_and_state(server: LiveServer):
    assert "serving first, second on http://" in server.line
    names = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert names == ["first", "second"]
    for name in (*names, None):
        reply = server.post("/v1/completions", prompt=[40], model=name, max_tokens=1)
        assert reply.status_code == 200 and reply.json()["model"] == (name or "first")
    assert server.post("/v1/completions", prompt=[40], model="third").status_code == 404
    for path in ("/health", "/ping", "/version", "/v1/models"):
        reply = server.http.head(path)
        assert reply.status_code == 200 and reply.content == b""
    assert server.http.get("/ping").json()["status"] == server.http.post("/ping").json()["status"] == "ok"


def test_a_key_of_any_letters(server: LiveServer):
    for key, status in ((KEY.encode(), 200), (KEY.encode("utf8").decode("latin-1").encode("utf8"), 401), (b"x", 401)):
        reply = httpx.get(server.url + "/v1/models", headers={"authorization": b"Bearer " + key}, timeout=180)
        assert reply.status_code == status


def test_an_empty_field_name_is_a_field_like_others(server: LiveServer):
    reply = server.post("/v1/completions", **{"prompt": [40], "max_tokens": 1, "": 1, " ": 2})
    assert reply.status_code == 200 and reply.headers["x-hone-ignored-fields"] == "?, ?"


@pytest.mark.parametrize(
    "name", ["regex", "json_schema", "grammar", "choice", "mirostat", "max_new_tokens", "lora_path"]
)
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_a_known_field_that_hone_lacks_is_an_error(name: str, kind: type):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], name: "x"}
    with pytest.raises(ApiError, match=name) as caught:
        parse_body(json.dumps(body).encode(), kind)
    assert caught.value.status == 400 and caught.value.param == name


def test_pages_of_allowed_origins(server: LiveServer):
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    reply = server.http.options("/v1/completions", headers=asks)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://page.example"
    other = server.http.get("/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_openapi_describes_every_endpoint_and_nothing_of_the_server(server: LiveServer):
    assert httpx.get(server.url + "/openapi.json", timeout=180).status_code == 401
    text = server.http.get("/openapi.json").text
    assert "first" not in json.loads(text)["info"].values() and KEY not in text and "127.0.0.1" not in text
    document = json.loads(text)
    for path, operations in document["paths"].items():
        for method in operations:
            reply = server.http.request(method, path.replace("{name}", "first"), content=b"{}")
            off = reply.status_code == 404 and reply.json()["error"].get("code") == "lora_updating_off"
            assert reply.status_code not in (404, 405, 500) or off, (path, reply.status_code)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert references == set(document["components"]["schemas"])
    properties = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert properties["temperature"]["anyOf"] and "not supported" in properties["regex"]["description"]
    assert document == json.loads(json.dumps(description(document["info"]["version"])))


def test_a_half_sent_head_and_a_half_sent_body_end(server: LiveServer):
    heads = [opened(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: ") for _ in range(5)]
    body = opened(server, post() + b'{"prompt": ')
    assert b" 408 " in body.recv(65536)
    for sock in heads:
        assert answer(sock) == b""  # before this side's own time-out: the server's usual one is longer
    body.close()
    dripped = opened(server, b"POST ")
    with pytest.raises(OSError):
        for _ in range(100):  # a byte now and then does not prolong it
            time.sleep(0.1)
            dripped.sendall(b"x")
    assert server.http.get("/health").status_code == 200


def test_connections_are_limited(server: LiveServer):
    reconnect(server)
    many = [opened(server, b"GET ") for _ in range(30)]
    replies = [answer(sock) for sock in many]
    assert sum(b"too_many_connections" in reply and b"retry-after" in reply for reply in replies) >= 9
    assert server.http.get("/health").status_code == 200


def test_garbage_does_not_end_the_server(server: LiveServer):
    for data in (
        b"\0\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"PUT / HTTP/1.1\r\n" * 9 + b"\r\n",
    ):
        answer(opened(server, data))
    assert server.http.get("/health").status_code == 200


def test_shutdown_hands_back_what_has_not_begun(folder: Path):
    # What runs ends on a busy machine, too.
    server = LiveServer(folder, "tests.serve.fake_engine:build_one", drain_s=150)
    replies: dict[str, httpx.Response] = {}

    def ask(name: str, tokens: int) -> None:
        replies[name] = server.post("/v1/completions", prompt=[40], max_tokens=tokens)

    threads = [threading.Thread(target=ask, args=("running", 1500))]
    threads[0].start()
    server.wait_for("hone:requests_outstanding", 1)
    half = opened(server, post() + b'{"prompt": ')
    threads += [threading.Thread(target=ask, args=(f"waiting {index}", 400)) for index in range(3)]
    for thread in threads[1:]:
        thread.start()
    server.wait_for("hone:requests_outstanding", 4)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert replies["running"].status_code == 200
    for name in ("waiting 0", "waiting 1", "waiting 2"):
        assert replies[name].status_code == 503 and replies[name].headers["retry-after"]
    assert b" 503 " in answer(half)
    assert server.process.wait(180) == 0
    server.stop()


def test_tls(folder: Path, tmp_path: Path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run(
        [*command, "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    server = LiveServer(folder, FAKE, ssl_keyfile=str(key), ssl_certfile=str(certificate))
    try:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(server.url + "/health", verify=trusted, timeout=180).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health", timeout=180)
    finally:
        server.stop()
    for fields in ({"ssl_keyfile": str(key)}, {"ssl_certfile": "nowhere.pem"}, {"ssl_certfile": str(key)}):
        with pytest.raises(SpecError):
            ServerSpec.read(fields).tls()


def test_sampling_defaults_of_the_model(tmp_path: Path):
    def write(text: str) -> None:
        (tmp_path / "generation_config.json").write_text(text)

    assert str(generation_defaults(tmp_path, "auto")) == ""
    with pytest.raises(SpecError, match="does not exist"):
        generation_defaults(tmp_path, str(tmp_path))
    write('{"temperature": 0.6, "top_k": 20, "top_p": 1.0, "max_new_tokens": 9, "do_sample": true, "eos_token_id": 1}')
    defaults = generation_defaults(tmp_path, "auto")
    assert str(defaults) == "temperature 0.6, top_k 20, at most 9 tokens a reply"
    assert str(generation_defaults(tmp_path, "vllm")) == ""
    body = parse_body(b'{"prompt": "a", "top_k": 3}', CompletionBody)
    defaults.fill(body)
    params = body.sampling(max_tokens=1)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 3, 1.0)
    for wrong in ("[]", "{", '{"temperature": "hot"}', '{"top_p": 7}', '{"top_k": true}', '{"max_new_tokens": 1.5}'):
        write(wrong)
        with pytest.raises(ArtifactError, match="generation_config"):
            generation_defaults(tmp_path, "auto")


def test_a_server_applies_and_tells_them(folder: Path, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "max_new_tokens": 3}')
    server = LiveServer(folder, FAKE, generation_config=str(tmp_path))
    try:
        assert "temperature 0.5, at most 3 tokens" in server.errors()
        for wanted, got in ((None, 3), (2, 2), (100, 3)):
            reply = server.post("/v1/completions", prompt=[40], max_tokens=wanted)
            assert reply.json()["usage"]["completion_tokens"] == got
    finally:
        server.stop()


def test_the_load_client_counts_tokens_and_failures(server: LiveServer):
    from benchmarks.serve_http import bodies_of, open_loop, rows_of

    bodies = bodies_of(4, "first", 8, 5, 256) + bodies_of(1, "third", 8, 5, 256)
    timings, seconds = asyncio.run(open_loop(server.url, KEY, bodies, 200.0, 0))
    assert [one.tokens for one in timings] == [5, 5, 5, 5, 0] and timings[-1].error
    rows = {row["figure"]: row["value"] for row in rows_of(timings, seconds, "x", 1e6, 1e6)}
    assert rows["x: failed"] == 1 and rows["x: output"] == pytest.approx(20 / seconds)
    assert rows["x: goodput (<= 1e+06 ms, <= 1e+06 ms/token)"] == pytest.approx(4 / seconds)
