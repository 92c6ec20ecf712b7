"""Engines on several ranks in a process that may be killed; their workers are forked from it, without imports of their own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hone.base.errors import HoneError
from hone.model import hf
from hone.serve.engine import Engine
from hone.serve.experts.balancing import imbalance
from hone.serve.ranks import opening
from hone.serve.ranks.worker import Worker
from hone.serve.request import Request, SamplingParams
from hone.serve.spec import EngineSpec


class Forked:
    """A forked process, as `hone.serve.ranks.links.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if pid else None
            return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork(_: int, steps: socket.socket, pings: socket.socket, others: Sequence[socket.socket]) -> Forked:
    """Starts a worker by a fork."""
    pid = os.fork()
    if pid:
        return Forked(pid)
    for one in others:
        one.close()
    Worker(steps, pings).main()
    os._exit(1)


def opened(folder: str, **spec: Any) -> Engine:
    opening.STARTS[0] = fork
    opening.INTERVAL_S[0] = 0.05
    sizes = {"block_size": 4, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, **spec}
    return Engine(folder, EngineSpec.read(sizes))


def pids(engine: Engine) -> list[int]:
    return [one.process.pid for one in engine.runner.links._workers]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # none, or it ended while it was read
        return False


def requests(params: list[dict]) -> list[Request]:
    prompts = [[(7 * place + 3 * at) % 61 for at in range(3 + 5 * place)] for place in range(len(params))]
    each = [(one.get("pooling"), {name: value for name, value in one.items() if name != "pooling"}) for one in params]
    return [
        Request(str(place), prompts[place], SamplingParams(**one), pooling=pooling)
        for place, (pooling, one) in enumerate(each)
    ]


def write(folder: str, spec: dict, params: list[dict]) -> dict:
    """The tokens, log-probabilities and embeddings of each request (`params` with `pooling`), and how the engine ended."""
    torch.set_num_threads(1)
    engine = opened(folder, **spec)
    workers = pids(engine) if engine.spec.num_ranks > 1 else []
    for one in requests(params):
        engine.add(one)
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[float]] = {}
    prompts: dict[str, list[float]] = {}
    pooled: dict[str, list[float]] = {}
    flying = 0
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            scores.setdefault(output.request_id, []).extend(one.logprob for one in output.logprobs)
            if output.prompt_logprobs is not None:
                prompts[output.request_id] = [one.logprob for one in output.prompt_logprobs if one is not None]
            if output.pooled is not None:
                pooled[output.request_id] = np.frombuffer(output.pooled, dtype=np.float32).tolist()
        flying = max(flying, len(engine._flying))
        engine.pool.check()
    used, pages = engine.pool.num_used, engine.pool.num_pages
    layers = [len(one) for one in engine.runner.cache.layers]
    engine.close()
    left = [pid for pid in workers if alive(pid)]
    return {
        "tokens": tokens, "scores": scores, "left": left, "used": used, "pages": pages, "layers": layers, "flying": flying,
        "workers": len(workers), "prompts": prompts, "pooled": pooled, "preemptions": engine.stats()["preemptions"],
    }  # fmt: skip


def rebalance(folder: str, spec: dict, params: list[dict]) -> dict:
    """Tokens of requests before and after rank 0 places experts anew, and what it counted and moved."""
    torch.set_num_threads(1)
    engine = opened(folder, **spec, enable_prefix_caching=False)

    def run() -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for one in requests(params):
            engine.add(one)
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.tokens)
        return tokens

    tokens, placing = run(), engine.runner.placing
    loads, before = placing.loads(), [one.spec.slots for one in placing.layers.values()]
    computed = sum(len(one.prompt) + one.params.max_tokens - 1 for one in requests(params))
    said = engine.runner.rebalance()
    slots = [one.spec.slots for one in placing.layers.values()]
    whole = hf.load(folder)
    weights = all(
        torch.equal(
            expert_of(getattr(one, name), slot), expert_of(getattr(whole.layers[index].feed_forward, name), expert)
        )
        for index, one in placing.layers.items()
        for slot, expert in enumerate(one.spec.own)
        for name in ("gate_up", "down")
    )
    was, will = (float(imbalance(loads, np.array(one), 2).mean()) for one in (before, slots))
    cleared = int(placing.loads().sum())
    assert cleared == 0, "counts begin anew"
    after = run()
    engine.close()
    return {
        "tokens": tokens, "after": after, "visits": loads.sum(1).tolist(), "computed": computed, "said": said, "was": was,
        "will": will, "slots": slots, "before": before, "weights": weights,
    }  # fmt: skip


def expert_of(linear: torch.nn.Module, index: int) -> torch.Tensor:
    """The weights of one expert, dense ones as they are and codes dequantized."""
    return linear.weight[index] if hasattr(linear, "weight") else linear[index].dequantize(torch.float32)


def reopen(folder: str, specs: list[dict]) -> list[str]:
    """What one process says when it opens engines one after another, and two at once."""
    said = []
    for spec in specs:
        engine = opened(folder, **spec)
        said.append(str(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0))[0].tokens))
        if spec is specs[-1]:
            said.append(refuse(folder, spec)["said"])
        engine.close()
        engine.close()
    return said


def break_rank(folder: str, spec: dict, how: str) -> dict:
    """What happens when rank 1 is killed, stopped or fails while requests run."""
    torch.set_num_threads(1)
    engine = opened(folder, **spec)
    workers = pids(engine)
    for one in requests([{"max_tokens": 60, "ignore_eos": True}] * 2):
        engine.add(one)
    for _ in range(5):
        engine.step()
    if how == "killed":
        os.kill(workers[0], signal.SIGKILL)
    elif how == "stopped":
        os.kill(workers[0], signal.SIGSTOP)
    elif how == "broken":
        engine.runner.links._workers[0].steps.send(3, b"no step")
    elif how == "lead":
        engine.runner.sampler = None
    said = []
    for _ in range(2):  # and every later step
        try:
            while True:
                engine.step()
        except HoneError as error:
            said.append(f"{type(error).__name__}: {error.what}")
    left = [pid for pid in workers if alive(pid)]
    engine.close()
    return {"said": said, "left": left}


def refuse(folder: str, spec: dict) -> dict:
    """What an engine that cannot be opened says, and the processes it leaves."""
    before = set(os.listdir("/proc"))
    try:
        opened(folder, **spec).close()
    except HoneError as error:
        time.sleep(0.1)
        new = [int(one) for one in set(os.listdir("/proc")) - before if one.isdigit()]
        mine = [one for one in new if _parent(one) == os.getpid() and alive(one)]
        return {"said": f"{type(error).__name__}: {error.what}", "fix": error.fix, "left": mine}
    return {"said": "nothing"}


def orphan(folder: str, spec: dict) -> None:
    """Ends without closing its engine, as a killed process does; standard error has the workers."""
    import sys

    engine = opened(folder, **spec)
    print(*pids(engine), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def call(name: str, *arguments: Any) -> Any:
    """One of the functions above, by name."""
    return globals()[name](*arguments)
