"""Data-parallel replicas: which one takes a request, and several engines of a tiny model behind one port."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from hone.base.errors import MachineError
from hone.serve.engine import Engine
from hone.serve.http.processes.board import EngineReport, added
from hone.serve.http.processes.replicas import Replicas
from hone.serve.replicas.router import Router
from hone.serve.replicas.shares import share_of
from hone.serve.request import SamplingParams
from hone.serve.spec import EngineSpec
from tests.serve.live import LiveServer, plain
from tests.serve.small import VOCAB, decoder

BLOCK = 16


def router(loads: list[int], **fields) -> Router:
    options = {"block_size": BLOCK, "max_keys": 1000, "abs_threshold": 4, "rel_threshold": 1.5, **fields}
    return Router(len(loads), loads.__getitem__, **options)


def prompt(seed: int, tokens: int = 4 * BLOCK) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(9, VOCAB) for _ in range(tokens)]


def test_a_prefix_stays_where_it_is_until_that_is_too_busy():
    loads = [0, 0, 0]
    route = router(loads)
    shared = prompt(1)
    home, keys = route.place(shared + prompt(2))
    assert len(keys) == 8
    assert {route.place(shared + prompt(number))[0] for number in range(3, 13)} == {home}
    loads[home] = 4  # not above the least by more than 4
    assert route.place(shared + prompt(20))[0] == home
    loads[home] = 5
    other = route.place(shared + prompt(21))[0]
    assert other != home
    loads[:] = [20, 20, 20]
    loads[home] = 29  # 9 more, but not 1.5 times as many; the other holds the prefix by now as well, and has less to do
    assert route.place(shared + prompt(22))[0] == other
    assert route.place(shared + prompt(2))[0] == home  # all eight pages are there, elsewhere four
    loads[home] = 31
    assert route.place(shared + prompt(2))[0] != home


def test_a_longer_match_wins_and_gaps_do_not_count():
    route = router([0, 0])
    first, second = prompt(1), prompt(2)
    home, keys = route.place(first)
    route.learn(route.place(second)[1], 1 - home)
    assert route.place(first + second)[0] == home
    gap = router([0, 0])
    gap.learn(keys[2:], 1 - home)
    gap.learn(keys[:1], home)
    assert gap.place(first)[0] == home


def test_salts_share_nothing():
    loads = [0, 0]
    route = router(loads)
    home, _ = route.place(prompt(1), "a")
    loads[home] = 1
    assert route.place(prompt(1), "a")[0] == home and route.place(prompt(1), "b")[0] != home


def test_new_prompts_go_to_the_least_loaded():
    loads = [0, 0, 0, 0]
    route = router(loads)
    for number in range(400):
        chosen, _ = route.place(prompt(1000 + number))
        assert loads[chosen] == min(loads)
        loads[chosen] += 1
    assert loads == [100] * 4


def test_independent_routers_choose_the_same_replicas():
    one, two = router([0, 0, 0]), router([0, 0, 0])
    chosen = [one.place(prompt(number))[0] for number in range(60)]
    assert chosen == [two.place(prompt(number))[0] for number in range(60)]
    assert min(Counter(chosen).values()) >= 8  # and yet spread


def test_what_is_remembered_is_bounded():
    route = router([0, 0], max_keys=8)
    for number in range(50):
        route.place(prompt(number))
    assert len(route._holders) == 8
    loads = [0, 0]
    known = router(loads, max_keys=8)
    home, _ = known.place(prompt(49))
    loads[home] = 1
    assert known.place(prompt(49))[0] == home
    for number in range(2):
        known.place(prompt(number))
    assert known.place(prompt(49))[0] != home  # forgotten: it goes where there is less to do


def test_replicas_share_out_devices_and_host_memory(monkeypatch: pytest.MonkeyPatch):
    spec = EngineSpec(tensor_parallel_size=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert share_of(spec, "cuda", 1, 2)[1] == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert share_of(spec, "cuda", 0, 2)[1] == {"CUDA_VISIBLE_DEVICES": "7,5"}
    assert share_of(spec, "cuda", 0, 1) == (spec, {})
    with pytest.raises(MachineError, match="3 replicas of 2 GPUs each, 4 GPUs are visible"):
        share_of(spec, "cuda", 2, 3)
    with pytest.raises(MachineError, match="2 replicas and one device cuda:1"):
        share_of(spec, "cuda:1", 0, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    part, environment = share_of(EngineSpec(), "cpu", 0, 3)
    assert part.gpu_memory_utilization == pytest.approx(0.1) and environment == {}


class Link:
    """An engine's handle that keeps what it is given."""

    def __init__(self, outstanding: int, progress_s: float) -> None:
        self.outstanding, self.last_progress_s = outstanding, progress_s
        self.heard = (EngineReport(3, progress_s, {"running": 1.0, "pages_total": 10.0}),)
        self.steps, self.death = 3, None
        self.given: list[list[str]] = []
        self.told: list[list[bytes]] = []

    def submit(self, requests, deliver, streams=()) -> None:
        self.given.append([request.id for request in requests])
        assert list(streams) in ([], [f"s{request.id}" for request in requests])

    def tell(self, keys) -> None:
        self.told.append(keys)

    def trouble(self, stall_s: float) -> str | None:
        return "stuck" if self.last_progress_s > stall_s else None


def test_several_engines_are_like_one():
    from hone.serve.request import Request

    links = [Link(0, 50.0), Link(2, 1.0)]
    both = Replicas(links, router([0, 5]), tells=True)
    one, two = prompt(1), prompt(2)
    requests = [Request(name, ids) for name, ids in (("a", one), ("b", one), ("c", two))]
    both.submit(requests, print, [f"s{request.id}" for request in requests])
    assert links[0].given == [["a", "b"], ["c"]] and [len(keys) for keys in links[0].told] == [4, 4]
    links[0].on_held(both._router.place(one)[1])
    assert (both.outstanding, both.steps, both.last_progress_s) == (2, 6, 1.0)  # the other is idle
    assert [one.at for one in both.heard] == [50.0, 1.0]
    assert added(both.heard) == {"running": 2.0, "pages_total": 20.0}
    assert both.trouble(30) == "replica 0: stuck" and both.death is None
    links[1].death = "gone"
    assert both.death == "gone"


# ---- real processes ------------------------------------------------------------------------------------------------

ENGINE = {"num_pages": 200, "block_size": BLOCK, "max_num_seqs": 8, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hone.model.hf import save

    found = tmp_path_factory.mktemp("tiny")
    save(decoder(max_seq_len=512), found)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    """Two engines of a tiny model behind two fronts."""
    live = LiveServer(folder, data_parallel_size=2, api_server_count=2, engine=ENGINE)
    yield live
    live.stop()


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two engines without a model behind one front."""
    found = tmp_path_factory.mktemp("fake")
    (found / "config.json").write_text("{}")
    live = LiveServer(found, "tests.serve.fake_engine:build", data_parallel_size=2)
    yield live
    live.stop()


def each(server: LiveServer, name: str) -> list[float]:
    """A figure of both replicas."""
    with plain() as client:
        text = client.get(f"{server.url}/metrics").text
    found = dict(re.findall(rf'^hone:replica_{name}{{.*replica="(\d)"}} (\S+)$', text, re.M))
    return [float(found.get(place, 0)) for place in "01"]


def complete(server: LiveServer, **body) -> list[int]:
    with plain() as client:
        reply = client.post(f"{server.url}/v1/completions", json={"temperature": 0, "ignore_eos": True, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


@pytest.mark.slow
def test_tokens_are_those_of_one_engine(server: LiveServer, folder: Path):
    prompts = [prompt(number, 40) for number in range(6)]
    engine = Engine(folder, EngineSpec(**ENGINE))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = [completion.tokens for completion in engine.generate(prompts, params)]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: complete(server, prompt=prompts[n], max_tokens=8)}))
        for n in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(prompts))] == expected


@pytest.mark.slow
def test_a_shared_prefix_goes_to_one_replica(server: LiveServer):
    """Through two fronts, on connections of their own."""
    before, shared = each(server, "prefix_hit_tokens"), prompt(77)
    for number in range(8):
        complete(server, prompt=shared + prompt(100 + number, 8), max_tokens=2)
    found = before
    for _ in range(1000):
        found = [now - then for now, then in zip(each(server, "prefix_hit_tokens"), before)]
        if sum(found) >= 7 * len(shared):
            break
        threading.Event().wait(0.1)
    assert sorted(found) == [0, 7 * len(shared)]


def test_load_is_divided(fakes: LiveServer):
    async def main() -> list[list[float]]:
        async with httpx.AsyncClient(base_url=fakes.url, timeout=180) as http:
            tasks = [
                asyncio.create_task(
                    http.post(
                        "/v1/completions", json={"prompt": prompt(200 + n, 20), "max_tokens": 1000, "ignore_eos": True}
                    )
                )
                for n in range(8)
            ]
            seen = []
            while not all(task.done() for task in tasks):
                seen.append(await asyncio.to_thread(each, fakes, "requests_outstanding"))
            assert {task.result().status_code for task in tasks} == {200}
            return seen

    seen = asyncio.run(main())
    assert max(min(pair) for pair in seen) >= 3, seen


def test_the_end_of_one_replica_ends_all(fakes: LiveServer):
    """The last test of this fakes."""
    url = fakes.url
    engines = [child for child in map(psutil.Process, fakes.workers()) if not child.net_connections("tcp")]
    assert len(engines) == 2
    body = {"prompt": prompt(5), "max_tokens": 5000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=180) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        for engine in engines[1:] if each(fakes, "requests_outstanding")[1] else engines[:1]:
            engine.kill()
        *_, error, done = lines
    assert done == "data: [DONE]" and "ended: killed by SIGKILL" in json.loads(error[6:])["error"]["message"]
    assert fakes.process.wait(90) == 1
    assert re.search(r"error: the engine process of replica [01] ended: killed by SIGKILL", fakes.errors())
