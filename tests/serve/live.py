"""A server in a process of its own, for tests that talk to it as clients do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0


class LiveServer:
    """`hone serve` on a free port. `build` is the "module:function" that makes the engine, by default the real one."""

    def __init__(self, folder: Path, build: str = "hone.serve.http.server:build_engine", **fields: Any) -> None:
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
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        timer = threading.Timer(_START_S, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        timer.cancel()
        found = re.search(r"https?://[\w.]+:\d+", self.line)
        if found is None:
            self.process.wait(60)
            raise RuntimeError(f"the server did not start: {self.errors()}")
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=120)

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

    def wait_for(self, name: str, value: float, seconds: float = 60.0) -> None:
        """Waits until metric `name` is `value`."""
        deadline = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Process ids of the server's children that run the engine."""
        try:
            found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except FileNotFoundError:
            return []
        return [
            int(one) for one in found if "spawn_main" in Path(f"/proc/{one}/cmdline").read_text().replace("\0", " ")
        ]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the server by a signal, if it still runs; its exit code."""
        self.http.close()
        if self._log.closed:
            return self.process.wait()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()
