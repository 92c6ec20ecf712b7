"""What goes wrong in the engine stays with the requests it hit, is told to them, and shows in /health."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve import fake_engine as fake
from tests.serve.live import LiveServer
from tests.serve.ranks.forked import alive
from tests.waiting import wait_until

FAKE = "tests.serve.fake_engine:build"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("no-model")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def fresh(folder: Path) -> Iterator[LiveServer]:
    """A server of its own for a test that ends it; what must end while it drains has time on a busy machine, too."""
    live = LiveServer(folder, FAKE, drain_s=150)
    yield live
    live.stop()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    live = LiveServer(folder, FAKE, anew=True, stall_s=0.6, max_queue=8)
    yield live
    live.stop()


def events(response: httpx.Response) -> list[dict | str]:
    """The data of every event of a stream, [DONE] as a string."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def stream(server: LiveServer, prompt: list[int], **body) -> list[dict | str]:
    with server.http.stream("POST", "/v1/completions", json={"prompt": prompt, "stream": True, **body}) as response:
        assert response.status_code == 200
        return events(response)


def test_without_a_tokenizer_only_token_ids(server: LiveServer):
    assert "no tokenizer.json" in server.errors() and "[1, 2, 3]" in server.line
    reply = server.post("/v1/completions", prompt=[40, 50], max_tokens=3).json()
    assert reply["choices"][0]["token_ids"] == [51, 52, 53]
    assert reply["choices"][0]["text"] == ""
    refused = server.post("/v1/completions", prompt="hello")
    assert refused.status_code == 400 and "token ids" in refused.json()["error"]["message"]
    assert server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}]).status_code == 400
    assert server.post("/tokenize", prompt="a").status_code == 400
    assert server.http.get("/tokenizer_info").status_code == 400


def test_an_engine_that_refuses_or_breaks_on_add(server: LiveServer):
    refused = server.post("/v1/completions", prompt=[fake.ADD_REFUSES])
    assert refused.status_code == 400 and "not this one" in refused.json()["error"]["message"]
    broken = server.post("/v1/completions", prompt=[fake.ADD_RAISES])
    assert broken.status_code == 500 and "add is broken" in broken.json()["error"]["message"]
    busy = server.post("/v1/completions", prompt=[fake.ADD_IS_BUSY])
    assert busy.status_code == 503 and int(busy.headers["retry-after"]) >= 1
    assert busy.json()["error"]["code"] == "queue_full"
    assert server.post("/v1/completions", prompt=[40]).status_code == 200


def test_a_failing_request_fails_alone(server: LiveServer):
    others: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: others.append(server.post("/v1/completions", prompt=[40], max_tokens=60)))
    thread.start()
    failed = server.post("/v1/completions", prompt=[fake.FAILS_ALONE])
    thread.join()
    assert failed.status_code == 500
    assert failed.json()["error"] == {
        "message": "this request is broken",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert others[0].status_code == 200 and others[0].json()["usage"]["completion_tokens"] == 60


def test_an_error_after_the_headers_is_an_event(server: LiveServer):
    got = stream(server, [fake.FAILS_ALONE, 20], max_tokens=9)
    assert [row["choices"][0]["token_ids"] for row in got[:2]] == [[21], [22]]
    assert got[2]["error"]["message"] == "this request is broken"
    assert got[3:] == ["[DONE]"]


def test_a_failing_choice_ends_the_other_choices_of_its_request(server: LiveServer):
    before = server.metric("hone:aborted")
    reply = server.post("/v1/completions", prompt=[[40], [fake.FAILS_ALONE]], max_tokens=50_000)
    assert reply.status_code == 500
    server.wait_for("hone:aborted", before + 1)
    server.wait_for("hone:num_requests_running", 0)


def test_a_step_that_raises_fails_its_requests_and_serving_goes_on(server: LiveServer):
    got = stream(server, [fake.STEP_RAISES, 20], max_tokens=9)
    assert "step is broken" in got[2]["error"]["message"]
    assert server.post("/v1/completions", prompt=[40]).status_code == 200
    assert server.http.get("/health").status_code == 200


@pytest.mark.slow
def test_health_is_by_progress(server: LiveServer):
    stuck = threading.Thread(target=lambda: server.post("/v1/completions", prompt=[fake.STUCK], max_tokens=4))
    stuck.start()
    seen = []
    deadline = time.monotonic() + fake.STUCK_S + 5
    while stuck.is_alive() and time.monotonic() < deadline:
        seen.append(server.http.get("/health"))
        time.sleep(0.1)
    stuck.join()
    bad = [one for one in seen if one.status_code == 503]
    assert bad and bad[0].json()["status"] == "stuck" and "no step ended" in bad[0].json()["reason"]
    assert server.http.get("/health").json()["status"] == "ok"


def test_the_queue_is_bounded(server: LiveServer):
    too_many = server.post("/v1/completions", prompt=[[40]] * 20)
    assert too_many.status_code == 400 and "at most 12" in too_many.json()["error"]["message"]
    release = threading.Event()

    def hold() -> None:
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": [[40]] * 12, "max_tokens": 90_000, "stream": True}
        ) as response:
            lines = response.iter_lines()  # dropping the iterator would close the stream
            next(lines)
            release.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    server.wait_for("hone:requests_outstanding", 12)
    full = server.post("/v1/completions", prompt=[40])
    release.set()
    thread.join()
    assert full.status_code == 503 and int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["code"] == "queue_full"
    server.wait_for("hone:requests_outstanding", 0)
    assert server.metric("hone:admission_rejections_total") >= 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_disconnect_aborts(server: LiveServer, streaming: bool, n: int):
    before = server.metric("hone:aborted")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [40], "max_tokens": 90_000, "stream": streaming, "n": n}).encode()
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + b"Content-Length: %d\r\n\r\n" % len(body)
            + body
        )
        server.wait_for("hone:requests_outstanding", n)
    server.wait_for("hone:aborted", before + n)
    server.wait_for("hone:requests_outstanding", 0)


def test_a_slow_client_stalls_nobody(server: LiveServer):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [40], "max_tokens": 20_000, "stream": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((host, int(port)))
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + b"Content-Length: %d\r\n\r\n" % len(body)
            + body
        )
        server.wait_for("hone:requests_outstanding", 1)  # and never read
        for _ in range(3):
            assert server.post("/v1/completions", prompt=[40], max_tokens=30).status_code == 200
    server.wait_for("hone:requests_outstanding", 0)


def test_a_dead_worker_is_told_to_all_and_ends_the_server(fresh: LiveServer):
    server = fresh
    assert len(server.workers()) == 1
    results: list = []
    threads = [
        threading.Thread(target=lambda: results.append(stream(server, [40], max_tokens=90_000))),
        threading.Thread(target=lambda: results.append(server.post("/v1/completions", prompt=[41], max_tokens=90_000))),
    ]
    for thread in threads:
        thread.start()
    server.wait_for("hone:requests_outstanding", 2)
    killed = stream(server, [fake.KILLED, 20], max_tokens=9)
    assert "killed by SIGKILL" in killed[-2]["error"]["message"] and killed[-1] == "[DONE]"
    for thread in threads:
        thread.join()
    streamed = next(one for one in results if isinstance(one, list))
    whole = next(one for one in results if not isinstance(one, list))
    assert "killed by SIGKILL" in streamed[-2]["error"]["message"]
    assert whole.status_code == 500 and "killed by SIGKILL" in whole.json()["error"]["message"]
    assert server.process.wait(180) == 1
    assert "the engine process ended: killed by SIGKILL" in server.errors()
    assert "fix:" in server.errors()


def test_an_engine_that_keeps_failing_ends_the_server(fresh: LiveServer):
    server = fresh
    for _ in range(3):
        got = stream(server, [fake.ALWAYS_RAISES, 20], max_tokens=9)
        assert "error" in got[-2]
    assert server.process.wait(180) == 1
    assert "step is broken" in server.errors()


def test_an_engine_that_cannot_be_built(folder: Path):
    with pytest.raises(RuntimeError, match="no engine today"):
        LiveServer(folder, "tests.serve.fake_engine:build_broken")


def test_sigterm_drains(fresh: LiveServer):
    server = fresh
    results: list = []
    thread = threading.Thread(
        target=lambda: results.append(server.http.post("/v1/completions", json={"prompt": [40], "max_tokens": 1500}))
    )
    thread.start()
    server.wait_for("hone:requests_outstanding", 1)
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    assert results[0].status_code == 200 and results[0].json()["usage"]["completion_tokens"] == 1500
    assert server.process.wait(180) == 0
    assert [line for line in server.errors().splitlines() if "no tokenizer.json" not in line] == []


def test_ctrl_c_ends_cleanly(fresh: LiveServer):
    server = fresh
    workers = server.workers()
    results: list = []
    thread = threading.Thread(target=lambda: results.append(stream(server, [40], max_tokens=90_000)))
    thread.start()
    server.wait_for("hone:requests_outstanding", 1)
    for pid in [server.process.pid, *workers]:  # a terminal signals the whole group
        os.kill(pid, signal.SIGINT)
    thread.join()
    assert results[0][-2]["error"]["message"] == "the server was stopped"
    assert server.process.wait(180) == 0
    assert [line for line in server.errors().splitlines() if "no tokenizer.json" not in line] == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_the_worker_goes_with_its_parent(fresh: LiveServer):
    server = fresh
    (worker,) = server.workers()
    server.stop(signal.SIGKILL)
    wait_until(lambda: not alive(worker), lambda: "the worker outlived the server")
