"""Hours of use in minutes: `python -m benchmarks.soak --minutes 20`. Random load on a live `hone serve`, and what it leaves.

A tiny random model with a cache too small for its load serves `--users` clients (`benchmarks.soak_load`): prompts with shared
prefixes, every sampling parameter, structured output, disconnects, mistakes, half-sent requests, embeddings, beams. `--kind`
has the server do more (`soak_models.KINDS`): adapters that come and go, a drafter, fewer bits, experts. Freed
pages are poisoned, and greedy replies are compared with those at rest. Every `--rest` seconds the load pauses: then nothing
may be left of it, and memory, objects, tasks and descriptors are read. In the last part of the time a supervisor's server is
killed again and again (its engine, itself, SIGTERM) and started again. The report names every fault; the exit code says
whether there was one. `--ledger` adds a row to ledger/serve.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ledger import append
from benchmarks.soak_load import Clients
from benchmarks.soak_models import ADAPTERS, KINDS, engine_fields, make_model

ROOT = Path(__file__).resolve().parents[1]
FIELDS: dict[str, Any] = {
    "served_model_name": "tiny",
    "max_queue": 200,
    "limits": {"text_processes": 1},
    "engine": {"num_pages": 40, "max_num_seqs": 12, "max_num_batched_tokens": 256, "num_threads": 1},
}
"""40 pages of 16 tokens: a seventh of what 12 sequences of up to 366 tokens need."""
ZERO = (
    "num_requests_running",
    "num_requests_waiting",
    "requests_outstanding",
    "pages_used",
    "soak_seqs",
    "soak_compiling",
)
"""Figures that are zero when no request is in progress."""
_PATIENCE_S = 240.0
"""Seconds for what must happen, on a busy machine too: that a server starts or ends, that nothing is in progress any more."""
_LONGEST = 15
"""Times its minutes that a soak lasts at most until it has seen enough."""
SETTLED_S = 1.0
"""Seconds after the last request until the figures are read: a worker's stats come when it rests."""
MOST = {
    **dict.fromkeys(("front_mib", "engine_mib"), 6.0),
    **dict.fromkeys(("front_objects", "soak_objects"), 3000.0),
    **dict.fromkeys(("front_fds", "engine_fds", "front_tasks", "front_threads", "front_job"), 3.0),
    **dict.fromkeys(("soak_request", "soak_constraint"), 3.0),
}
"""The most by which a figure may grow from the middle third of the rests to the last one: MiB of a process, objects known to
its collector, descriptors, tasks, threads, and live objects of a class."""
SHOWN = ("front_mib", "engine_mib", "front_objects", "soak_objects", "front_fds", "engine_fds", "front_tasks")
"""Figures of which the report has every rest."""


class Supervised:
    """A server that is started again whenever it ends, as a service manager would."""

    def __init__(self, folder: Path, log: Path, kind: str, engine: dict[str, Any]) -> None:
        # Bound all the time, so that nobody is given the port while the server does not listen, clients that try it included.
        self._taken = socket.socket()
        self._taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._taken.bind(("127.0.0.1", 0))
        self.port = self._taken.getsockname()[1]
        self.url, self.log, self._folder = f"http://127.0.0.1:{self.port}", log, folder
        self.engine = {**FIELDS["engine"], **engine_fields(kind, folder), **engine}
        self.adapters = {name: folder.parent / name for name in ADAPTERS} if kind == "adapters" else {}
        self.exits: list[int] = []
        self.ended_at = -1e9
        self.ready = threading.Event()
        self._stopping = False
        self.process: subprocess.Popen[str]
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        if not self.ready.wait(_PATIENCE_S):
            raise RuntimeError(f"the server did not start: {self.text()[-2000:]}")

    def _keep(self) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.soak_server",
            str(self._folder),
            str(self.port),
            json.dumps({**FIELDS, "engine": self.engine}),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HONE_API_KEY": "", "PYTHONPATH": str(ROOT)}
        while not self._stopping:
            with open(self.log, "a", encoding="utf8") as log:
                pipe = subprocess.PIPE
                self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=log, text=True)
            assert self.process.stdout is not None
            for line in self.process.stdout:
                if line.startswith("serving"):
                    self.ready.set()
            code = self.process.wait()
            self.ready.clear()
            self.ended_at = time.monotonic()
            self.exits.append(code)

    def text(self) -> str:
        return self.log.read_text(encoding="utf8", errors="replace")

    def disturbed(self, begun: float) -> bool:
        """Whether the server was ended after `begun` or just before it, or is not there."""
        return not self.ready.is_set() or begun - 1.0 < self.ended_at

    def end(self, pid: int, number: int) -> None:
        self.ended_at = time.monotonic() + 3600  # until `_keep` knows when it was
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def stop(self) -> int:
        self._stopping = True
        self.process.send_signal(signal.SIGTERM)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            self.process.kill()
        self._taken.close()
        return self.exits[-1] if self.exits else -1


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for one in map(int, task.read_text().split()):
                found += [one, *descendants(one)]
    return found


def held(pid: int) -> dict[str, float]:
    """MiB of own memory, and open descriptors, of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status)
    return {"mib": int(found[1]) / 1024 if found else 0.0, "fds": len(os.listdir(f"/proc/{pid}/fd"))}


class Soak:
    """One run: load, rests, kills, and the faults found."""

    def __init__(
        self, args: argparse.Namespace, server: Supervised, enough: Callable[[Soak], bool] = lambda _: True
    ) -> None:
        self.args, self.server, self._enough = args, server, enough
        self.clients = Clients(server.url, args.seed, server.disturbed, server.adapters)
        self.rests: list[dict[str, float]] = []
        self.faults: list[str] = []
        self.kills: dict[str, int] = {}
        self.totals: dict[str, float] = {}

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as http:
            await self.clients.learn(http)
        begun, all_s = time.monotonic(), self.args.minutes * 60
        most_s = _LONGEST * all_s
        while (lasted := time.monotonic() - begun) < all_s * (1 - self.args.killing) or (
            lasted < most_s and not self._enough(self)
        ):
            await self.load(self.args.rest)
            self.rests.append(await self.rest())
            self.say(begun)
        while time.monotonic() - begun < all_s or (self.args.killing and not self.kills):
            await asyncio.gather(self.load(self.args.kill_every * 2), self.killer(self.args.kill_every))
            await self.rest()
            self.say(begun)

    def say(self, begun: float) -> None:
        last = self.rests[-1] if self.rests else {}
        shown = ", ".join(
            f"{name} {last[name]:.0f}" for name in ("front_mib", "engine_mib", "front_objects") if name in last
        )
        print(f"{time.monotonic() - begun:6.0f} s: {self.clients.done.total()} acts, {shown}, {self.kills}, "
              f"{len(self.clients.wrong) + len(self.faults)} faults", flush=True)  # fmt: skip

    async def load(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        await asyncio.gather(*(self.clients.user(lambda: time.monotonic() < ends) for _ in range(self.args.users)))

    async def killer(self, every: float) -> None:
        """Ends the server somehow, once the load has begun; waits until there is a new one."""
        await asyncio.sleep(every * random.uniform(0.3, 1.0))
        pid = self.server.process.pid
        family = descendants(pid)
        self.add_up(await self.figures())
        engine = int((await self.figures())["soak_engine_pid"])
        how, victim, number = self.clients.rng.choice([
            ("engine killed", engine, signal.SIGKILL), ("front killed", pid, signal.SIGKILL), ("SIGTERM", pid, signal.SIGTERM),
        ])  # fmt: skip
        self.kills[how] = self.kills.get(how, 0) + 1
        lives = len(self.server.exits)
        self.server.end(victim, number)
        deadline = time.monotonic() + _PATIENCE_S
        while len(self.server.exits) == lives or not self.server.ready.is_set():
            if time.monotonic() > deadline:
                self.faults.append(f"no server {_PATIENCE_S:.0f} s after: {how}")
                return
            await asyncio.sleep(0.1)
        expected = {"engine killed": 2, "front killed": -signal.SIGKILL, "SIGTERM": 0}[how]
        if self.server.exits[lives] != expected:
            self.faults.append(f"{how}: exit code {self.server.exits[lives]}, not {expected}")
        left = [one for one in family if _same(one)]
        if left:
            self.faults.append(f"{how}: processes {left} of the old server still run")

    async def figures(self) -> dict[str, float]:
        """/metrics as numbers; of histograms nothing."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as http:
            text = (await http.get("/metrics")).text
        rows = re.findall(r"^(hone|soak):(\w+?)(?:_total)?(?:{[^}]*})? (\S+)$", text, re.M)
        found: dict[str, float] = {}
        for prefix, name, value in rows:
            if name.endswith(("_bucket", "_sum", "_count", "_created")):
                continue
            name = name if prefix == "hone" else f"front_{name}"
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def add_up(self, found: dict[str, float]) -> None:
        for name in ("num_preemptions", "prefix_cache_hits", "steps", "engine_output_tokens"):
            self.totals[name] = self.totals.get(name, 0.0) + found.get(name, 0.0)

    async def rest(self) -> dict[str, float]:
        """Waits until nothing is in progress; what is then held. What should not be is a fault."""
        deadline, found = time.monotonic() + _PATIENCE_S, {}
        await asyncio.sleep(SETTLED_S)
        while time.monotonic() < deadline:
            if self.server.ready.is_set():
                found = await self.figures()
                if "soak_seqs" in found and not any(found[name] for name in ZERO):
                    break
            await asyncio.sleep(0.3)
        for name in ZERO:
            if found.get(name, 1.0):
                self.faults.append(f"at rest {name} is {found.get(name)}")
        if found.get("pages_free") != self.server.engine["num_pages"]:
            self.faults.append(f"at rest {found.get('pages_free')} pages are free")
        for name in ("soak_slots", "soak_seq"):  # the slots of the last step are held until the next one
            if found.get(name, 0) > self.server.engine["max_num_seqs"]:
                self.faults.append(f"at rest {name} is {found[name]:.0f}")
        for who, pid in (("front", self.server.process.pid), ("engine", int(found.get("soak_engine_pid", 0)))):
            found |= {f"{who}_{name}": value for name, value in held(pid).items()} if pid else {}
        return found

    def judge(self) -> dict[str, Any]:
        """Growth of everything held, and more faults if it is too much; the figures of the run."""
        growth = {}
        for name, most in MOST.items() if self.rests else ():
            values = [one[name] for one in self.rests]
            third = max(1, len(values) // 3)
            growth[name] = statistics.median(values[-third:]) - statistics.median(values[third : 2 * third] or values)
            if growth[name] > most:
                self.faults.append(f"{name} grew by {growth[name]:.1f} between the middle and the last rests: {values}")
        if self.rests:
            self.add_up(self.rests[-1])
        text = self.server.text()
        for mark in ("Traceback", "was never retrieved", "Task was destroyed", "never awaited"):
            if mark in text:
                self.faults.append(
                    f"the server's errors have {mark!r}: {text[max(0, text.index(mark) - 200) :][:1500]}"
                )
        self.faults += [f"{one} ({count} times)" for one, count in _counted(self.clients.wrong)]
        done = self.clients.done
        return {"acts": dict(done.most_common()), "kills": self.kills, "rests": len(self.rests), "growth": growth,
                "totals": self.totals, "held": {name: [one[name] for one in self.rests] for name in SHOWN}, "faults": self.faults}  # fmt: skip


def _same(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _counted(lines: list[str]) -> list[tuple[str, int]]:
    return sorted(((one, lines.count(one)) for one in set(lines)), key=lambda pair: -pair[1])


def soak(args: argparse.Namespace, work: Path, enough: Callable[[Soak], bool] = lambda _: True) -> dict[str, Any]:
    """Runs it; the report. The part without kills lasts until `enough` was seen in it, where need be beyond its time."""
    folder = work / "tiny"
    server = Supervised(make_model(folder, args.kind), work / "log", args.kind, json.loads(args.engine))
    one = Soak(args, server, enough)
    try:
        asyncio.run(one.run())
    finally:
        code = server.stop()
    if code != 0:
        one.faults.append(f"SIGTERM at the end: exit code {code}")
    return one.judge()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--rest", type=float, default=30.0, help="seconds of load between two rests")
    parser.add_argument(
        "--killing", type=float, default=0.35, help="part of the time, its end, in which servers are ended"
    )
    parser.add_argument("--kill_every", type=float, default=15.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), default="plain", help="what the server does besides")
    parser.add_argument("--engine", default="{}", help='more fields of the engine, as JSON: {"async_scheduling": true}')
    parser.add_argument("--ledger", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hone-soak-") as work:
        report = soak(args, Path(work))
    print(json.dumps(report, indent=1))
    if args.ledger:
        row = {"figure": f"soak, tiny model, {args.kind}, {args.users} users: acts", "value": sum(report["acts"].values()), "unit": "acts",
               "n": 1, "minutes": args.minutes, **report}  # fmt: skip
        print(append("serve", [row]))
    sys.exit(f"{len(report['faults'])} faults" if report["faults"] else 0)


if __name__ == "__main__":
    main()
