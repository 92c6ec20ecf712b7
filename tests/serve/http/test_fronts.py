"""Several front processes on one port: limits and metrics over all, ends and restarts, aborts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from hone.base.errors import MachineError, SpecError
from hone.serve.http.processes.board import EngineReport, FrontBoard, FrontReport, newest
from hone.serve.http.processes.tallies import Counter, state_of
from hone.serve.http.server import listen, listen_together
from hone.serve.http.spec import ProcessesSpec, ServerSpec
from tests.serve import fake_engine as fake
from tests.serve.live import LiveServer, plain
from tests.waiting import wait_until

COUNT = 2
LONG = 90_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("fake")
    (found / "config.json").write_text("{}")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    live = LiveServer(
        folder,
        "tests.serve.fake_engine:build",
        anew=True,
        api_server_count=COUNT,
        max_queue=4,
        api_key="secret",
        drain_s=150,  # what has begun ends on a busy machine, too
    )
    live.http.headers["authorization"] = "Bearer secret"
    yield live
    live.stop()


def fronts(server: LiveServer) -> list[psutil.Process]:
    """The front processes: those that listen on the port."""
    port = int(server.url.rpartition(":")[2])
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in child.net_connections("tcp")):
                found.append(child)
    return found


def asked(server: LiveServer, first: int = 40, count: int = LONG, *, stream: bool = False) -> socket.socket:
    """A request that is sent, on a connection of its own that ends with the reply."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=180)
    body = json.dumps({"prompt": [first], "max_tokens": count, "stream": stream}).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer secret\r\n"
        + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return sock


def stream(server: LiveServer) -> socket.socket:
    """A stream that has begun, on a connection of its own."""
    sock = asked(server, stream=True)
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


def counters(server: LiveServer) -> dict[str, float]:
    """What may only grow, from whichever front a new connection reaches."""
    with plain() as client:
        text = client.get(f"{server.url}/metrics").text
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows if name.partition("{")[0].endswith(("_total", "_count"))}


def metric(server: LiveServer, name: str) -> float:
    """As `LiveServer.metric`, from whichever front a new connection reaches."""
    with plain() as client:
        text = client.get(f"{server.url}/metrics").text
    rows = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in rows)


def until(server: LiveServer, name: str, value: float) -> None:
    wait_until(lambda: metric(server, name) == value, lambda: f"{name} is {metric(server, name)}, not {value}")


def test_connections_are_divided_and_metrics_are_summed(server: LiveServer):
    assert len(fronts(server)) == COUNT
    counts = ("hone:e2e_request_latency_seconds_count", "hone:request_generation_tokens_count")
    before, done = metric(server, "hone:generation_tokens_total"), metric(server, counts[0])
    for number in range(24):
        with plain(headers={"authorization": "Bearer secret"}) as client:
            reply = client.post(f"{server.url}/v1/completions", json={"prompt": [number + 20], "max_tokens": 2})
        assert reply.json()["choices"][0]["token_ids"] == [number + 21, number + 22]
    for name in counts:  # a front tells the others a moment after its reply
        until(server, name, done + 24)
    until(server, "hone:generation_tokens_total", before + 48)
    until(server, "hone:requests_outstanding", 0)
    for _ in range(4):  # whichever front replies
        assert [metric(server, name) for name in counts] == [done + 24] * 2


def test_counters_never_fall_whichever_front_replies(server: LiveServer):
    """A fall is a restart to Prometheus: `rate()` would count everything once more."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            with plain(headers={"authorization": "Bearer secret"}) as client:
                client.post(f"{server.url}/v1/completions", json={"prompt": [20], "max_tokens": 3})

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        before: dict[str, float] = {}
        falls = []
        for _ in range(150):
            now = counters(server)
            falls += [(name, value, now[name]) for name, value in before.items() if now[name] < value]
            before = now
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not falls
    assert {name.partition("{")[0] for name in before} >= {"hone:steps_total", "hone:generation_tokens_total"}
    until(server, "hone:requests_outstanding", 0)


def test_the_key_holds_at_every_front(server: LiveServer):
    for _ in range(12):
        with plain() as client:
            assert client.get(f"{server.url}/v1/models").status_code == 401


def test_the_queue_is_bounded_over_all_fronts(server: LiveServer):
    """4 run and 4 may wait: of 24 requests at once on connections of their own exactly 8 are taken."""
    open_ = [asked(server) for _ in range(24)]
    for _ in range(16):
        ready, _, _ = select.select(open_, [], [], 180)
        sock = ready[0]
        open_.remove(sock)
        with sock.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after:" in head.lower()
        assert json.loads(body)["error"]["code"] == "queue_full"
        sock.close()
    until(server, "hone:requests_outstanding", 8)
    assert select.select(open_, [], [], 0)[0] == []
    for sock in open_:
        sock.close()
    until(server, "hone:requests_outstanding", 0)


def test_a_disconnect_at_any_front_reaches_the_engine(server: LiveServer):
    aborted = metric(server, "hone:aborted")
    streams = [stream(server) for _ in range(4)]
    until(server, "hone:requests_outstanding", 4)
    for one in streams:
        one.close()
    until(server, "hone:requests_outstanding", 0)
    until(server, "hone:aborted", aborted + 4)


def test_a_front_that_is_killed_is_started_again(server: LiveServer):
    streams = [stream(server) for _ in range(4)]
    until(server, "hone:requests_outstanding", 4)
    counted, victims = metric(server, "hone:http_replies_total"), fronts(server)
    victim = max(victims, key=lambda one: len(one.net_connections("tcp")))  # it has a stream at least
    ended = len([one for one in victim.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED])
    victim.kill()
    wait_until(lambda: victim.pid not in {one.pid for one in fronts(server)} and len(fronts(server)) >= COUNT)
    until(server, "hone:requests_outstanding", 4 - min(ended, 4))  # the engine ended those of its streams
    for _ in range(2 * COUNT):
        assert metric(server, "hone:http_replies_total") >= counted  # counters do not go back
    for one in streams:
        one.close()
    until(server, "hone:requests_outstanding", 0)
    (line,) = [line for line in server.errors().splitlines() if line.startswith("warning: front")]
    assert f"of {COUNT} ended: killed by SIGKILL; its connections ended with it, it is started again" in line


def test_a_port_that_is_shared_is_in_use_for_others(server: LiveServer):
    port = int(server.url.rpartition(":")[2])
    for attempt in (lambda: listen("127.0.0.1", port), lambda: listen_together("127.0.0.1", port, 2)):
        with pytest.raises(MachineError, match=f"port {port} of 127.0.0.1 is in use"):
            attempt()


def test_sigterm_drains_every_front(server: LiveServer):
    """The last test of this server. Requests that have begun are finished; one that waits would be refused."""
    lines: list[list[str]] = []
    begun = threading.Semaphore(0)

    def read() -> None:
        body = {"prompt": [50], "max_tokens": 1500, "stream": True}
        with (
            plain(headers={"authorization": "Bearer secret"}) as client,
            client.stream("POST", f"{server.url}/v1/completions", json=body) as reply,
        ):
            given = (line for line in reply.iter_lines() if line)
            first = next(given)
            begun.release()
            lines.append([first, *given])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=180) for _ in threads)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0
    for thread in threads:
        thread.join()
    assert [len(one) for one in lines] == [1501] * 4 and {one[-1] for one in lines} == {"data: [DONE]"}
    assert not psutil.wait_procs(children, timeout=90)[1]


def test_the_end_of_the_engine_ends_all(folder: Path):
    live = LiveServer(folder, "tests.serve.fake_engine:build", api_server_count=2)
    body = {"prompt": [fake.KILLED], "max_tokens": 9, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and "the engine process ended: killed by SIGKILL" in lines[-2]
    assert live.process.wait(90) == 1
    found = live.errors()
    live.stop()
    assert found.count("error: the engine process ended: killed by SIGKILL") == 2  # when it happens, and at the end
    assert "front" not in found


@pytest.mark.slow
def test_all_end_with_the_supervisor(folder: Path):
    live = LiveServer(folder, "tests.serve.fake_engine:build", api_server_count=2)
    children = psutil.Process(live.process.pid).children(recursive=True)
    live.process.kill()
    gone, alive = psutil.wait_procs(children, timeout=90)
    live.stop()
    assert len(gone) >= 3 and not alive


def test_ctrl_c_ends_all(folder: Path):
    """It reaches every process of the terminal."""
    live = LiveServer(folder, "tests.serve.fake_engine:build", api_server_count=2)
    body = {"prompt": [50], "max_tokens": LONG, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        for process in [*psutil.Process(live.process.pid).children(recursive=True), live.process]:
            process.send_signal(signal.SIGINT)
        *_, error, done = lines
    assert "the server was stopped" in error and done == "data: [DONE]"
    assert live.process.wait(90) == 0
    live.stop()


def test_the_numbers_of_processes_have_vllms_names():
    spec = ServerSpec().override({"api_server_count": "3", "processes.data_parallel_size": "2"})
    assert (spec.processes.api_server_count, spec.processes.data_parallel_size) == (3, 2)
    assert ServerSpec(data_parallel_size=2).processes == ProcessesSpec(data_parallel_size=2)
    with pytest.raises(SpecError, match=r"processes\.api_server_count = 0"):
        ServerSpec.read({"api_server_count": 0})


def test_counts_of_a_front_remain_after_its_end():
    board = FrontBoard(2, replicas=2)
    board.count(0, 1, 5)
    board.count(1, 0, 2)
    board.count(1, 1, 3)
    assert [board.outstanding(0), board.outstanding(1), board.total()] == [2, 8, 10]
    counter = Counter("hone:x", "X.", ("a",))
    counter.inc(3, ("one",))
    told = FrontReport(state_of([counter]), (EngineReport(5, 1.5, {"pages": 2.0}),))
    board.tell(1, told)
    board.leave(1)
    assert board.total() == 5 and board.told(1) == told
    assert board.told(0) == FrontReport()
    start, end = board._half(1, board._turn(1) + 1)
    board._memory[start:end] = b"\xff" * (end - start)  # a front that was killed while it wrote
    assert board.told(1) == told
    board.tell(1, FrontReport(heard=(EngineReport(6),)))
    assert board.told(1) == FrontReport(heard=(EngineReport(6),)) and board.told(0) == FrontReport()


def test_what_is_told_is_read_whole_while_it_is_written():
    """A reader and a writer in two processes: what is read is one of what was told, and never an earlier one."""
    board = FrontBoard(2)
    states = [FrontReport({"x": {("label",): [float(number)] * (1 + number % 700)}}) for number in range(3000)]
    if (writer := os.fork()) == 0:
        for told in states:
            board.tell(1, told)
        os._exit(0)
    seen = [0]
    while seen[-1] < len(states) - 1 and len(seen) < 10**6:
        if told := board.told(1).counted:
            (values,) = told["x"].values()
            assert len(values) == 1 + int(values[0]) % 700 and len(set(values)) == 1
            seen.append(int(values[0]))
    assert os.waitpid(writer, 0)[1] == 0 and seen[-1] == len(states) - 1 and seen == sorted(seen)


def test_the_newest_figures_are_those_that_any_front_heard_last():
    one = (EngineReport(7, 1.0, {"pages": 1.0}), EngineReport(3, 9.0, {"pages": 4.0}))
    two = (EngineReport(5, 2.0, {"pages": 2.0}), EngineReport(4, 8.0, {"pages": 3.0}))
    assert newest([one, (), two]) == [EngineReport(7, 2.0, {"pages": 2.0}), EngineReport(4, 9.0, {"pages": 4.0})]
    assert newest([two, one]) == newest([one, two]) and newest([()]) == []


@pytest.mark.slow
def test_a_hanging_front_stops_no_other(folder: Path):
    live = LiveServer(folder, "tests.serve.fake_engine:build", api_server_count=2)
    try:
        streams = [stream(live) for _ in range(4)]
        hung = max(fronts(live), key=lambda one: len(one.net_connections("tcp")))
        hung.suspend()
        before, deadline = read_steps(live), time.monotonic() + 180
        while read_steps(live) == before:
            assert time.monotonic() < deadline, "the engine stands still"
        hung.resume()
        for one in streams:
            one.close()
    finally:
        live.stop()


def read_steps(server: LiveServer) -> float:
    """The engine's steps, from a front that does not hang; connections that reach the other one get no reply."""
    for _ in range(40):
        try:
            with plain(timeout=2) as client:
                text = client.get(f"{server.url}/metrics").text
        except httpx.TimeoutException:
            continue
        return float(
            next(line for line in text.splitlines() if line.startswith("hone:steps_total{")).rpartition(" ")[2]
        )
    raise AssertionError("no front replies")
