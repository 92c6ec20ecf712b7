"""A server in a process of its own, for tests that talk to it as clients do."""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import httpx

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
_START_S = 300.0
"""Seconds until a server that does not start is killed: on a busy machine the imports of several processes take a minute."""
plain = functools.partial(httpx.Client, timeout=180, verify=False)
"""A client with connections of its own that reads no certificates: that takes longer than most requests."""


@functools.cache
def starter() -> socket.socket:
    """The process that servers are forked from (tests.serve.starter); it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.Popen([sys.executable, "-m", "tests.serve.starter"], cwd=ROOT, env=environment, stdin=theirs)
    theirs.close()
    return ours


class Started:
    """A forked server, as a `subprocess.Popen`."""

    def __init__(self, code: str, imports: list[str], environment: dict[str, str], stderr: IO[str]) -> None:
        ends, told = os.pipe()
        output, stdout = os.pipe()
        call = {"code": code, "imports": imports, "environment": environment}
        socket.send_fds(starter(), [json.dumps(call).encode()], [stdout, stderr.fileno(), told])
        os.close(stdout)
        os.close(told)
        self.stdout = os.fdopen(output)
        self._ends = os.fdopen(ends)
        self.pid = int(self._ends.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("the server", timeout or 0)
        return code

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ends], [], [], timeout)[0]:
            self.returncode = int(self._ends.readline())
            self._ends.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class LiveServer:
    """`hone serve` on a free port. `build` is the "module:function" that makes the engine, by default the real one.

    Its processes are forked from ones that have imported everything; with `anew` all begin as those of users.
    """

    def __init__(
        self, folder: Path, build: str = "hone.serve.http.server:build_engine", *, anew: bool = False, **fields: Any
    ) -> None:
        module, _, name = build.partition(":")
        code = (
            f"from {module} import {name} as build\n"
            "from hone.base.errors import HoneError\n"
            "from hone.serve.http import ServerSpec, serve\n"
            "import sys\n"
            "try:\n"
            f"    serve({str(folder)!r}, ServerSpec.read({ {'port': 0, **fields}!r}), build=build)\n"
            "except HoneError as error:\n"
            "    sys.exit(f'error: {error}')\n"
        )
        self._log = tempfile.TemporaryFile("w+", encoding="utf8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HONE_API_KEY": ""}
        self.process: Any
        if anew:
            command = [sys.executable, "-c", code]
            pipes = {"stdout": subprocess.PIPE, "stderr": self._log, "text": True}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        else:
            imports = [module if module.startswith("tests") else "hone.serve.engine"]
            self.process = Started(code, imports, environment, self._log)
        timer = threading.Timer(_START_S, self.process.kill)
        timer.start()
        self.line = self.process.stdout.readline()
        timer.cancel()
        found = re.search(r"https?://[\w.]+:\d+", self.line)
        if found is None:
            self.process.wait(120)
            raise RuntimeError(f"the server did not start: {self.errors()}")
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=180, verify=False)

    def errors(self) -> str:
        """What the server wrote to standard error."""
        self._log.seek(0)
        return self._log.read()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        """The sum of all series of one metric."""
        rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.http.get("/metrics").text, re.M)
        assert rows, f"no metric {name}"
        return sum(float(row) for row in rows)

    def wait_for(self, name: str, value: float) -> None:
        """Waits until metric `name` is `value`."""
        wait_until(lambda: self.metric(name) == value, lambda: f"{name} is {self.metric(name)}, not {value}")

    def workers(self) -> list[int]:
        """Process ids of the server's children that run the engine."""
        try:
            found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except FileNotFoundError:
            return []
        return [int(one) for one in found if re.search("spawn_main|tests.serve.starter", command_of(one))]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the server by a signal, if it still runs; its exit code."""
        self.http.close()
        if self._log.closed:
            return self.process.wait()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(180)  # it may drain meanwhile
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.stdout.close()
            self._log.close()


def command_of(pid: str) -> str:
    """The words of a process's command; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it ended meanwhile
        return ""
