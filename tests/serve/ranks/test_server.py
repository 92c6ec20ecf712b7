"""`hone serve` on several processes that it starts itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hone.model import hf
from tests.serve.live import LiveServer, command_of
from tests.serve.ranks.forked import alive
from tests.serve.small import decoder, dense_greedy
from tests.waiting import wait_until


def workers(server: LiveServer) -> list[int]:
    """The processes of ranks 1 and up: children of the engine's process."""
    found = []
    for engine in server.workers():
        found += Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [int(one) for one in found if "hone.serve.ranks.worker" in command_of(one)]


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), lambda: f"{pids} still run")


@pytest.mark.slow
def test_a_server_on_two_ranks_answers_and_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    model = decoder(tie_embeddings=False)
    hf.save(model, tmp_path / "model")
    server = LiveServer(tmp_path / "model", anew=True, engine={"tensor_parallel_size": 2, "num_pages": 64})
    (rank,) = workers(server)
    body = {"prompt": [3, 4, 5], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = server.post("/v1/completions", **body).json()
    assert reply["choices"][0]["token_ids"] == dense_greedy(model, [3, 4, 5], 8)
    os.kill(rank, signal.SIGKILL)  # while no request runs
    assert server.process.wait(180) != 0
    assert "rank 1 of 2 ended: killed by SIGKILL" in server.errors()
    wait_until_gone([rank])
    server.stop()


@pytest.mark.slow
def test_sigterm_ends_all_ranks(tmp_path: Path) -> None:
    hf.save(decoder(), tmp_path / "model")
    server = LiveServer(tmp_path / "model", anew=True, engine={"pipeline_parallel_size": 2, "num_pages": 64})
    ranks = workers(server)
    assert len(ranks) == 1 and server.post("/v1/completions", prompt=[1, 2], max_tokens=3).status_code == 200
    assert server.stop() == 0
    wait_until_gone(ranks)
