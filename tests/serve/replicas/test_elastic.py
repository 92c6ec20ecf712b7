"""Replicas that come and go with the load in a real server: started under load, drained after it, replaced when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from hone.base.errors import MachineError, SpecError
from hone.serve.http.spec import ServerSpec
from hone.serve.replicas.autoscale.doubling import Doubling
from hone.serve.replicas.autoscale.hysteresis import Hysteresis
from hone.serve.replicas.router import Router
from hone.serve.replicas.shares import share_of
from hone.serve.spec import EngineSpec
from tests.serve.live import LiveServer, plain
from tests.waiting import wait_until

POLICY = {"kind": "hysteresis", "high": 3, "low": 1.5, "look_back_s": 0.4, "cool_down_s": 0.4, "max_replicas": 3}
AUTO = {"processes": {"autoscaler": POLICY, "scale_interval_s": 0.2}}


def prompt(seed: int, tokens: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(9, 250) for _ in range(tokens)]


def test_retired_replicas_get_nothing_and_what_they_held_is_forgotten():
    loads = [0, 0, 0]
    route = Router(3, loads.__getitem__, block_size=16, max_keys=10_000, abs_threshold=4, rel_threshold=1.5)
    shared = prompt(1, 64)
    home, _ = route.place(shared)
    route.retire(home)
    assert home not in {route.place(shared + prompt(number, 16))[0] for number in range(2, 30)}
    assert {route.place(prompt(number, 40))[0] for number in range(60)} == {0, 1, 2} - {home}
    route.admit(home)
    assert home in {route.place(prompt(1000 + number, 40))[0] for number in range(60)}
    assert route.place(shared)[0] != home  # its pages went with the process


def test_replicas_auto_is_a_policy_and_a_number_is_a_number():
    assert isinstance(ServerSpec.read({"replicas": "auto"}).processes.autoscaler, Hysteresis)
    assert ServerSpec.read({"replicas": 3}).processes.data_parallel_size == 3
    chosen = ServerSpec.from_overrides(
        {"replicas": "auto", "processes.autoscaler.max_replicas": "5"}
    ).processes.autoscaler
    assert chosen.kind == "hysteresis" and chosen.max_replicas == 5
    assert isinstance(ServerSpec.read({"autoscaler": "doubling"}).processes.autoscaler, Doubling)
    with pytest.raises(SpecError, match="the number of replicas is fixed"):
        ServerSpec.read({"processes": {"scale_interval_s": 1.0}})


def test_more_replicas_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(MachineError, match="4 replicas of 1 GPUs each, 2 GPUs are visible"):
        share_of(EngineSpec(), "cuda", 3, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One engine without a model at first, up to three."""
    found = tmp_path_factory.mktemp("fake")
    (found / "config.json").write_text("{}")
    live = LiveServer(found, "tests.serve.fake_engine:build", **AUTO)
    yield live
    live.stop()


def engines(server: LiveServer) -> list[psutil.Process]:
    """The processes of engines: those that do not listen."""
    found = []
    for pid in server.workers():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ends just now
            child = psutil.Process(pid)
            if child.status() != psutil.STATUS_ZOMBIE and not child.net_connections("tcp"):
                found.append(child)
    return found


def outstanding(server: LiveServer) -> list[float]:
    with plain() as client:
        text = client.get(f"{server.url}/metrics").text
    found = dict(re.findall(r'^hone:replica_requests_outstanding{.*replica="(\d)"} (\S+)$', text, re.M))
    return [float(found.get(place, 0)) for place in "012"]


async def load(server: LiveServer, count: int, tokens: int, seed: int, watch) -> list[httpx.Response]:
    """`count` requests at once; `watch` is called in a thread until all are answered."""
    async with httpx.AsyncClient(base_url=server.url, timeout=180) as http:
        bodies = [
            {"prompt": prompt(seed + number), "max_tokens": tokens, "ignore_eos": True} for number in range(count)
        ]
        tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
        while not all(task.done() for task in tasks):
            await asyncio.to_thread(watch)
        return [task.result() for task in tasks]


def test_load_starts_replicas_and_its_end_drains_them(server: LiveServer):
    """Every request is answered in full; new replicas take what waits; in the end one replica is left, and it serves."""
    assert len(engines(server)) == 1
    most, busy = 0, [0.0] * 3

    def watch() -> None:
        nonlocal most, busy
        most = max(most, len(engines(server)))
        busy = [max(pair) for pair in zip(busy, outstanding(server), strict=True)]

    replies = asyncio.run(load(server, 24, 2000, 0, watch))
    assert [reply.status_code for reply in replies] == [200] * 24
    assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {2000}
    assert most == 3 and all(busy), (most, busy)
    wait_until(lambda: len(engines(server)) == 1, lambda: f"{len(engines(server))} engines are left")
    assert server.post("/v1/completions", prompt=prompt(5), max_tokens=3).status_code == 200
    assert server.http.get("/health").status_code == 200


def test_a_killed_replica_is_replaced_and_takes_no_waiting_request_with_it(server: LiveServer):
    """Requests that had not begun are answered by others; the one that had ends with an error that says why."""
    victim = engines(server)[0]
    body = {"prompt": prompt(7), "max_tokens": 50_000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=180) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)

        async def killed() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=180) as http:
                # Four run at once: these wait, since the step is held up from here on.
                victim.suspend()
                bodies = [{"prompt": prompt(50 + number), "max_tokens": 5, "ignore_eos": True} for number in range(6)]
                tasks = [asyncio.create_task(http.post("/v1/completions", json=one)) for one in bodies]
                await asyncio.to_thread(
                    wait_until, lambda: sum(outstanding(server)) >= 7, lambda: str(outstanding(server))
                )
                victim.kill()
                return list(await asyncio.gather(*tasks))

        replies = asyncio.run(killed())
        *_, error, done = lines
    assert [one.status_code for one in replies] == [200] * 6
    assert {one.json()["usage"]["completion_tokens"] for one in replies} == {5}
    assert done == "data: [DONE]" and "killed by SIGKILL" in json.loads(error[6:])["error"]["message"]
    assert "the others go on" in server.errors()
    wait_until(lambda: victim.pid not in server.workers() and len(engines(server)) >= 1, lambda: "no engine is left")
    assert server.post("/v1/completions", prompt=prompt(5), max_tokens=3).status_code == 200


@pytest.mark.slow
def test_tokens_are_those_of_one_engine(tmp_path: Path):
    """A real tiny model on two replicas, of which an autoscaler disposes."""
    from hone.model.hf import save
    from hone.serve.engine import Engine
    from hone.serve.request import SamplingParams
    from tests.serve.small import VOCAB, decoder

    save(decoder(max_seq_len=512), tmp_path)
    sizes = {"num_pages": 200, "block_size": 16, "max_num_seqs": 2, "num_threads": 1}
    prompts = [[token % (VOCAB - 9) + 9 for token in prompt(number, 30)] for number in range(12)]
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    expected = [one.tokens for one in Engine(tmp_path, EngineSpec(**sizes)).generate(prompts, params)]
    two = {"processes": {"autoscaler": {**POLICY, "cool_down_s": 600}, "data_parallel_size": 2}}
    live = LiveServer(tmp_path, engine=sizes, **two)

    async def main() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=live.url, timeout=180) as http:
            body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
            replies = await asyncio.gather(
                *(http.post("/v1/completions", json={**body, "prompt": one}) for one in prompts)
            )
            return [reply.json()["choices"][0]["token_ids"] for reply in replies]

    try:
        assert asyncio.run(main()) == expected
        assert len(engines(live)) >= 2
    finally:
        live.stop()
