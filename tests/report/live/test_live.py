"""The page of running trainings: what it reads of logs that grow, move and are damaged, what it draws, what it sends."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import threading
from pathlib import Path

import pytest

from hone.cli import main
from hone.report.live.reading import POINTS, Board, RunLog, Series
from hone.report.live.view import NARROW, fragment
from tests.report.markup import Walk

pytest.importorskip("fastapi")


def write(folder: Path, *rows: dict | str, name: str = "steps.jsonl", mode: str = "a") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode, encoding="utf8") as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def steps(first: int, last: int) -> list[dict]:
    return [
        {"step": at, "loss": 5 - at / 100, "lr": 0.1, "grad_norm": 1.0, "tokens": at * 10}
        for at in range(first, last + 1)
    ]


def losses(log: RunLog) -> list[tuple[float, float]]:
    return log.series["loss"].points if "loss" in log.series else []


def test_a_training_from_before_its_first_step_to_its_end(tmp_path):
    """It has no folder, then a partial one, then grows, and is renamed; only what is new is read again."""
    out, partial = tmp_path / "train-base", tmp_path / "train-base.partial"
    board = Board([out])
    assert board.poll() == 1 and [run.state for run in board.runs] == ["waiting"]
    assert board.poll() == 1, "nothing is new"
    write(partial, json.dumps({"spec": {"steps": 50}}), name="begun.json")
    write(partial, *steps(1, 3), '{"step": 4, "lo')
    (run,) = board.runs
    board.poll()
    assert run.state == "running" and len(losses(run)) == 3 and run.total == 50 and run.step == 3
    write(partial, 'ss": 4.5}\n')
    board.poll()
    assert losses(run)[-1] == (4, 4.5) and run.garbage == 0
    write(partial, {"step": 4, "val_loss": 4.0, "val_bits_per_byte": 1.0}, *steps(5, 50))
    partial.rename(out)
    (out / "hone.json").write_text(json.dumps({"spec": {"steps": 50}}))
    before = board.version
    assert board.poll() == before + 1
    assert run.state == "done" and len(losses(run)) == 50 and run.last("val_loss") == 4.0
    assert board.poll() == before + 1


def test_a_resumed_training_drops_the_steps_after_its_checkpoint(tmp_path):
    log = RunLog(tmp_path / "train-base")
    partial = tmp_path / "train-base.partial"
    write(partial, *steps(1, 9))
    write(partial, {"step": 1, "busy_s": [1, 2], "wait_s": [1, 0]}, {"step": 1, "mfu": 0.5}, name="log/timing.jsonl")
    log.poll()
    assert log.ranks["busy_s"] == [1, 2] and log.last("mfu") == 0.5
    write(partial, *[{**row, "loss": 1.0} for row in steps(1, 20)], mode="w")  # longer than before, and another text
    log.poll()
    assert [value for _, value in losses(log)] == [1.0] * 20 and log.last("mfu") == 0.5
    write(partial, *steps(1, 2), mode="w")
    write(partial, name="log/timing.jsonl", mode="w")
    log.poll()
    assert len(losses(log)) == 2 and log.ranks is None and "mfu" not in log.series


@pytest.mark.parametrize(
    "line", ["no json\n", "[1, 2]\n", '{"loss": 1}\n', '{"step": "x"}\n', '{"step": NaN}\n', "\x00\xff\n", "[" * 9999 + "\n", '{"step": true}\n',
             f'{{"step": {10**400}}}\n', f'{{"step": 3, "loss": -{10**400}}}\n']
)  # fmt: skip
def test_garbage_is_counted_and_passed_over(line, tmp_path):
    log = RunLog(tmp_path / "x")
    write(tmp_path / "x.partial", *steps(1, 2), line, "\n", *steps(3, 3))
    log.poll()
    assert len(losses(log)) == 3 and log.garbage == 1
    assert "1 line of its logs cannot be read" in fragment([log], 600)


def test_values_that_are_no_numbers_are_no_points(tmp_path):
    log = RunLog(tmp_path / "x")
    rows = [
        {"step": 1, "loss": None, "lr": "<b>", "skipped": True, "why": "<script>"},
        '{"step": 2, "loss": Infinity}\n',
    ]
    write(tmp_path / "x.partial", *rows, {"step": 3, "loss": 2.0})
    write(
        tmp_path / "x.partial",
        {"step": 3, "busy_s": ["a"], "wait_s": [1]},
        {"step": 3, "busy_s": [], "wait_s": []},
        name="log/timing.jsonl",
    )
    log.poll()
    assert losses(log) == [(3, 2.0)] and log.ranks is None and log.garbage == 0
    assert "<script>" not in fragment([log], 600)


def test_a_long_curve_is_bounded_and_keeps_its_shape():
    series = Series()
    for step in range(1, 10 * POINTS + 1):
        series.add(step, math.sin(step / POINTS))
    assert POINTS <= len(series.points) < 2 * POINTS and series.last == (10 * POINTS, math.sin(10))
    assert all(abs(math.sin(step / POINTS) - value) < 1e-3 for step, value in series.points)
    assert series.points == sorted(series.points)


def test_a_folder_of_trainings_shows_those_in_it(tmp_path):
    board = Board([tmp_path / "work"])
    board.poll()
    assert [run.state for run in board.runs] == ["waiting"]
    write(tmp_path / "work" / "train-b.partial", *steps(1, 1))
    write(tmp_path / "work" / "train-a", *steps(1, 1))
    (tmp_path / "work" / "data-text").mkdir()
    (tmp_path / "work" / "train-a" / "hone.json").write_text("damaged")
    board.poll()
    assert [(run.name, run.state) for run in board.runs] == [("train-a", "done"), ("train-b", "running")]
    assert Board([tmp_path / "train-x.partial"]).folders == [tmp_path / "train-x"]


def seen(tmp_path: Path, *names: str) -> list[RunLog]:
    logs = []
    for name in names:
        write(tmp_path / f"{name}.partial", *steps(1, 60), {"step": 60, "val_loss": 4.2})
        times = {"step": 59, "busy_s": [0.2, 0.5], "wait_s": [0.3, 0.01]}
        write(
            tmp_path / f"{name}.partial",
            {"step": 60, "tokens_per_s": 5e3, "mfu": 0.4, "memory_bytes": 2**30},
            times,
            name="log/timing.jsonl",
        )
        logs.append(RunLog(tmp_path / name))
        logs[-1].poll()
    return logs


@pytest.mark.parametrize("width", [358.0, 1080.0])
def test_what_is_drawn(width, tmp_path):
    body = fragment(seen(tmp_path, "train-<a>", "train-b"), width)
    Walk(f"<!doctype html><html><body>{body}</body></html>")
    assert "train-&lt;a&gt;" in body and "<a>" not in body
    for words in (
        "training loss",
        "validation loss",
        "40.0%",
        "1.00 GiB",
        "Loss",
        "Norm of the gradient",
        "0.500 s + 0.0100 s",
    ):
        assert words in body, words
    assert 'aria-label="Loss over the steps: train-&lt;a&gt; ' in body and body.count('class="line r1"') >= 3
    sizes = [float(found) for found in re.findall(r'viewBox="0 0 (\S+) ', body)]
    assert sizes and max(sizes) <= width - 46 and min(sizes) >= NARROW - 60
    for at in re.findall(r'<text x="([\d.]+)"', body):
        assert 0 <= float(at) <= width


def test_experts_have_curves(tmp_path):
    found = {"expert_load": 1.5, "expert_drops": 0.02, "router_entropy": 1.9, "expert_loads": {"0": [3, 1]}}
    write(tmp_path / "train-a.partial", *({**row, **found} for row in steps(1, 5)))
    log = RunLog(tmp_path / "train-a")
    log.poll()
    body = fragment([log], 1080.0)
    for words in ("Busiest expert", "Visits to experts dropped", "Entropy of routers", "busiest expert / mean", "1.50"):
        assert words in body, words


def test_a_server_sends_what_is_new_and_outlives_its_clients(tmp_path):
    import uvicorn

    from hone.report.live.server import app_of

    write(tmp_path / "train-a.partial", *steps(1, 3))
    app = app_of([tmp_path / "train-a"], look_s=0.02)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            asyncio.run(asyncio.wait_for(_client(sock.getsockname()[1], tmp_path, app), 120))
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


async def _client(port: int, folder: Path, app) -> None:
    import httpx

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        page = await client.get("/")
        assert page.status_code == 200 and "train-a - hone watch" in page.text and "step 3" in page.text
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "{{" not in page.text and "http" not in policy
        assert (await client.get("/events?width=x")).status_code == 422
        async with client.stream("GET", "/events?width=600") as one, client.stream("GET", "/events?width=600") as other:
            news, others = one.aiter_lines(), other.aiter_lines()
            assert "step 3" in await _news(news) and "step 3" in await _news(others)
            write(folder / "train-a.partial", *steps(4, 4))
            assert "step 4" in await _news(news)
            await other.aclose()  # a client that goes away
            (folder / "train-a.partial").rename(folder / "train-a")
            (folder / "train-a" / "hone.json").write_text("{}")
            assert "done, step 4" in await _news(news)
            shutil.rmtree(folder / "train-a")
            assert "step 4" in await _news(news)  # what was read stays
        while app.state.shown.viewers:  # until the server has noticed that both are gone
            await asyncio.sleep(0)
        assert (await client.get("/")).status_code == 200


async def _news(lines) -> str:
    """The next fragment of a stream."""
    async for line in lines:
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


def test_what_the_command_refuses(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, said in (
            (["watch"], "hone watch needs FOLDER"),
            (["watch", "s3://x/y"], "is a URL"),
            (["watch", "x", "--port=many"], "--port=many is no port"),
            (["watch", "x", "--step=3"], "hone watch has no option --step"),
            (["watch", "x", f"--port={port}"], f"port {port} of 127.0.0.1 is in use"),
        ):
            assert main(words) == 2
            assert said in capsys.readouterr().err
    assert main(["watch", "--help"]) == 0 and "usage: hone watch FOLDER ..." in capsys.readouterr().out
