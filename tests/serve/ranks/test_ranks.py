"""Engines on several processes give the tokens of one, share its sizes, and leave no process behind."""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.base.errors import SpecError
from hone.measure.topology.pin import Bound
from hone.model import hf
from hone.parallel.place import Place
from hone.serve.engine import Engine
from hone.serve.ranks import opening
from hone.serve.ranks.frames import FrameSocket, MessageKind
from hone.serve.ranks.links import Links, _Worker
from hone.serve.spec import EngineSpec
from tests.forking import Ended, forking
from tests.serve.ranks import forked
from tests.serve.small import decoder
from tests.waiting import wait_until

GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
MIXED = [
    {**GREEDY, "logprobs": 2},
    {**GREEDY, "max_tokens": 9},
    {
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
    },
    {"max_tokens": 14, "temperature": 0.8, "top_p": 0.9, "seed": 1, "ignore_eos": True},
    {**GREEDY, "max_tokens": 11, "allowed_token_ids": [3, 4, 5, 9, 10]},
]
LAYOUTS = [
    {"tensor_parallel_size": 2, "async_scheduling": True},
    {"tensor_parallel_size": 4},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
]


@pytest.fixture(scope="module")
def call() -> Iterator[Any]:
    with forking("tests.serve.ranks.forked:call") as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    hf.save(decoder(tie_embeddings=False), path)
    return path


def result(ended: Ended) -> Any:
    assert ended.returncode == 0, ended.stderr
    return ended.result


@pytest.fixture(scope="module")
def alone(call, folder: Path) -> dict:
    return result(call("write", folder, {}, MIXED))


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_ranks_write_what_one_process_writes(call, folder: Path, alone: dict, spec: dict) -> None:
    found = result(call("write", folder, spec, MIXED))
    assert found["tokens"] == alone["tokens"]
    assert found["scores"]["0"] == pytest.approx(alone["scores"]["0"], abs=1e-4)
    assert found["workers"] == EngineSpec.read(spec).num_ranks - 1
    assert (found["used"], found["left"]) == (0, [])


def test_with_tied_embeddings_few_pages_and_guesses(call, tmp_path: Path) -> None:
    """Preempted sequences are computed again on all ranks, and all accept the same guesses."""
    hf.save(decoder(seed=3, num_layers=3, num_kv_heads=1), tmp_path / "model")
    few = {"num_pages": 14, "max_num_batched_tokens": 16}
    wanted = result(call("write", tmp_path / "model", {}, [GREEDY] * 4))
    for spec in (
        {"tensor_parallel_size": 2, **few, "drafter": {"kind": "prompt_lookup"}},
        {"pipeline_parallel_size": 3, **few},
    ):
        assert result(call("write", tmp_path / "model", spec, [GREEDY] * 4))["tokens"] == wanted["tokens"]


SCORED = [
    {**GREEDY, "max_tokens": 28, "prompt_logprobs": 1, "pooling": "mean"},
    {**GREEDY, "max_tokens": 0, "pooling": "last"},
    {**GREEDY, "max_tokens": 0, "prompt_logprobs": 0, "pooling": "mean"},
    {**GREEDY, "min_tokens": 3, "stop_token_ids": list(range(0, 61, 4)), "logit_bias": {7: 3.0}},
]


@pytest.fixture(scope="module")
def scored(call, folder: Path) -> dict:
    return result(call("write", folder, {}, SCORED * 2))


@pytest.mark.parametrize("spec", [
    {"tensor_parallel_size": 2, "async_scheduling": True},
    {"tensor_parallel_size": 2, "drafter": {"kind": "prompt_lookup", "min_ngram": 1}},
    {"pipeline_parallel_size": 2},
], ids=str)  # fmt: skip
def test_scores_embeddings_and_ends_of_few_pages(call, folder: Path, scored: dict, spec: dict) -> None:
    few = {"num_pages": 13, "max_num_batched_tokens": 12}
    wanted, found = scored, result(call("write", folder, {**spec, **few}, SCORED * 2))
    assert found["tokens"] == wanted["tokens"] and found["preemptions"] > 0
    for kind, count in (("prompts", 4), ("pooled", 6)):
        assert sorted(found[kind]) == sorted(wanted[kind]) and len(found[kind]) == count
        for name, numbers in wanted[kind].items():
            assert found[kind][name] == pytest.approx(numbers, abs=1e-3)


def test_stages_have_a_step_each_under_way(call, folder: Path) -> None:
    found = result(call("write", folder, {"pipeline_parallel_size": 2}, [GREEDY] * 4))
    assert found["flying"] == 1  # beside the one whose results were just read
    assert found["layers"] == [2, 0]  # pages for the layers of its stage alone


def test_the_cache_is_sized_by_a_ranks_own_heads(call, folder: Path) -> None:
    sizes = {"num_pages": None, "kv_cache_memory_bytes": 1 << 18}
    pages = [
        result(call("write", folder, {**sizes, **spec}, [GREEDY]))["pages"]
        for spec in ({}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2})
    ]
    # 2 key heads: ranks beyond them hold a copy each. (The null page counts too.)
    assert [one + 1 for one in pages] == [256, 512, 512, 512]


@pytest.mark.parametrize(
    ("how", "spec", "says"),
    [
        ("killed", {"tensor_parallel_size": 2}, "RankError: rank 1 of 2 ended: killed by SIGKILL"),
        ("killed", {"pipeline_parallel_size": 2}, r"RankError: rank 1 of 2 \(stage 1 of 2\) ended: killed by SIGKILL"),
        ("stopped", {"tensor_parallel_size": 2}, r"RankError: rank 1 of 2 does not answer for \d+ s"),
        ("broken", {"tensor_parallel_size": 2}, "RankError: rank 1 of 2 failed: ValueError"),
        ("lead", {"tensor_parallel_size": 2}, "RankError: rank 0 failed: AttributeError"),
    ],
)
def test_a_lost_rank_ends_all_with_one_error(call, folder: Path, how: str, spec: dict, says: str) -> None:
    found = result(
        call("break_rank", folder, {**spec, "distributed_timeout_seconds": 3 if how == "stopped" else 120}, how)
    )
    assert re.match(says, found["said"][0]) and found["said"][1] == found["said"][0]
    assert found["left"] == []


def test_of_a_step_that_hangs_a_rank_that_is_silent_is_the_cause() -> None:
    """Which of the two has lasted too long first is chance."""
    links = Links([], 3.0, interval_s=0.05)
    links.close()
    now = time.monotonic()
    worker = _Worker(Place.of(1, 2, 1), None, None, None, now)  # type: ignore[arg-type]
    links._workers.append(worker)
    assert links._hanging() is None
    links._waiting_since = now - 3.5
    assert links._hanging().startswith("a step has not ended for")
    worker.heard_at = now - 2.9
    assert links._hanging().startswith("rank 1 of 2 does not answer for 3 s")
    links.waits(False)
    worker.heard_at = time.monotonic()
    assert links._hanging() is None


class SlowWorker:
    """A worker in a thread that takes its time over its first step; it is a `hone.serve.ranks.links.Process`, too."""

    pid = 0

    def __init__(self, steps: socket.socket, pings: socket.socket) -> None:
        self.done: list[MessageKind] = []
        self.killed = self.cut_off = False
        self._steps, self._pings = FrameSocket(steps.dup()), pings.dup()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                kind, _ = self._steps.receive()
                ready, _, _ = select.select([self._pings], [], [], 0.3)
                self.cut_off |= bool(ready) and not self._pings.recv(100)  # a process would end here
                self.done.append(kind)
        except EOFError:
            self._pings.close()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        self.killed = True


def test_workers_end_the_steps_that_they_were_sent() -> None:
    """Kernels of rank 0 wait for their sums: it would hang with a worker that ends in the middle."""
    made: list[SlowWorker] = []
    start = lambda _, steps, pings, __: made.append(SlowWorker(steps, pings)) or made[-1]  # noqa: E731
    links = Links([Place.of(1, 2, 1)], 60.0, start=start, interval_s=60.0)
    links.send(MessageKind.PREPARE, b"")
    links.send(MessageKind.STEP, b"")
    links.close(30.0)
    assert made[0].done == [MessageKind.PREPARE, MessageKind.STEP]
    assert not made[0].killed and not made[0].cut_off


def test_graphs_end_before_the_collectives_that_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicators wait for the graphs that captured them, and an end that waits for NCCL has an end itself."""
    order: list[str] = []
    never = threading.Event()
    monkeypatch.setattr(opening, "_abort", lambda: order.append("abort") or never.wait(60))
    monkeypatch.setattr(opening.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(opening.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(opening, "_ABORT_S", 0.05)
    monkeypatch.setattr(opening, "say_once", order.append)
    parts = [SimpleNamespace(close=lambda *_, name=name: order.append(name)) for name in ("links", "graphs")]
    opening._end(parts[0], Bound(""), parts[1])  # type: ignore[arg-type]
    never.set()
    assert order[:3] == ["links", "graphs", "abort"] and "have not ended" in order[3]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"tensor_parallel_size": 3}, "SpecError: layer 0: attention.num_heads 4 cannot be divided among 3"),
        ({"pipeline_parallel_size": 3}, "SpecError: 2 layers make no 3 pipeline stages"),
        ({"tensor_parallel_size": 2, "num_pages": 10**9}, "FitError: 1000000000 pages"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_opened_leaves_no_process(call, folder: Path, spec: dict, says: str) -> None:
    found = result(call("refuse", folder, spec))
    assert found["said"].startswith(says) and found["left"] == []


def test_a_closed_engine_makes_room_for_another(call, folder: Path) -> None:
    said = result(call("reopen", folder, [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]))
    assert said[0] == said[1] and said[2].startswith("SpecError: this process is in a torch.distributed group already")


def test_workers_end_with_a_killed_rank_0(call, folder: Path) -> None:
    ended = call("orphan", folder, {"tensor_parallel_size": 2})
    assert ended.returncode == -9
    worker = int(ended.stderr.split()[-1])
    wait_until(lambda: not forked.alive(worker), lambda: "the worker still runs")


def test_what_does_not_go_together_is_said() -> None:
    with pytest.raises(SpecError, match="given model cannot be divided"):
        Engine(decoder(), EngineSpec(tensor_parallel_size=2))
    for fields in (
        {"tensor_parallel_size": 2, "draft": "x"},
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        {"pipeline_parallel_size": 2, "drafter": {"kind": "prompt_lookup"}},
    ):
        with pytest.raises(SpecError, match=r"engine\.draft|pipeline_parallel_size"):
            EngineSpec.read(fields)


@pytest.mark.parametrize("spec", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_random_weights_need_no_more_than_a_config(call, folder: Path, tmp_path: Path, spec: dict) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = result(call("write", tmp_path, {"load_format": "dummy", **spec}, [GREEDY] * 2))
    assert [len(one) for one in found["tokens"].values()] == [12, 12]
