"""A server under an open load over HTTP: `python -m benchmarks.serve_http http://127.0.0.1:8000 --model NAME`.

Requests arrive by a Poisson process at each of three `--rates` (requests/s), whether or not earlier ones are answered, and
stream; printed are p50 and p99 of the time to the first token and between tokens, output tokens/s, and goodput: requests/s
that met both limits (`--ttft-ms`, `--itl-ms`). Any OpenAI server will do, hone's, vLLM's, or (`--fake`) hone's front
over an engine that gives every sequence one token each `--step-ms`, which measures the front alone: it also says what part
of the engine's own rate reaches clients at `--streams` streams at once. Rows go to benchmarks/ledger/serve_http.jsonl.

Several tokens may come in one event after a wait; the time between tokens is that of events with text or ids. The client's
processes (`--clients`) of asyncio streams share the machine's cores with the server: on a small machine they are part of the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.ledger import append, table

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Timing:
    """Times of one request: seconds from its arrival to the first token, gaps between tokens, tokens in all."""

    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


async def ask(url: str, key: str, body: dict[str, Any]) -> Timing:
    """One streamed request to /v1/completions."""
    parts = urlsplit(url)
    timing, started, last = Timing(), time.perf_counter(), 0.0
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.hostname}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    secret = f"Authorization: Bearer {key}\r\n" if key else ""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=2**20)
        writer.write(f"{head}{secret}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = (await reader.readline()).split(b" ")[1:2]
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b'data: {"error"'):
                timing.error = line[:200].decode("utf8", "replace")
                break
            if b'"choices":[{' not in line:
                continue
            now = time.perf_counter()
            if timing.first_s is None:
                timing.first_s = now - started
            else:
                timing.gaps_s.append(now - last)
            last = now
            timing.tokens += 1
        if status != [b"200"] or timing.first_s is None:
            timing.error = timing.error or f"status {status}"
    except OSError as error:
        timing.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return timing


async def open_loop(
    url: str, key: str, bodies: list[dict[str, Any]], rate: float, seed: int
) -> tuple[list[Timing], float]:
    """All requests, arriving `rate` a second by a Poisson process (inf: at once); their timings and the seconds in all."""
    rng = random.Random(seed)
    started, due, tasks = time.perf_counter(), 0.0, []
    for body in bodies:
        tasks.append(asyncio.create_task(ask(url, key, body)))
        due += rng.expovariate(rate) if rate != float("inf") else 0.0
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
    return list(await asyncio.gather(*tasks)), time.perf_counter() - started


def _share(url: str, key: str, bodies: list[dict[str, Any]], rate: float, seed: int, due: float) -> Any:
    return asyncio.run(_opened(url, key, bodies, rate, seed, due))


async def _opened(url: str, key: str, bodies: list[dict[str, Any]], rate: float, seed: int, due: float) -> Any:
    await asyncio.sleep(max(0.0, due - time.time()))
    return await open_loop(url, key, bodies, rate, seed)


def load_of(
    url: str, key: str, bodies: list[dict[str, Any]], rate: float, seed: int, clients: int
) -> tuple[list[Timing], float]:
    """`open_loop` by so many client processes: a Poisson process is the sum of theirs."""
    if clients == 1:
        return asyncio.run(open_loop(url, key, bodies, rate, seed))
    with ProcessPoolExecutor(clients, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.2] * clients))  # started
        due = time.time() + 0.5
        parts = [
            pool.submit(_share, url, key, bodies[n::clients], rate / clients, 1000 * seed + n, due)
            for n in range(clients)
        ]
        found = [part.result() for part in parts]
    return [one for timings, _ in found for one in timings], max(seconds for _, seconds in found)


def quantile(values: list[float], part: float) -> float:
    """The smallest value that at least `part` of `values` do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def rows_of(timings: list[Timing], seconds: float, name: str, ttft_ms: float, itl_ms: float) -> list[dict[str, Any]]:
    """The figures of one run as rows of the ledger."""
    good = [one for one in timings if one.error is None]
    firsts = [1000 * one.first_s for one in good if one.first_s is not None]
    gaps = [1000 * gap for one in good for gap in one.gaps_s]
    met = sum(
        1000 * one.first_s <= ttft_ms and (not one.gaps_s or 1000 * sum(one.gaps_s) / len(one.gaps_s) <= itl_ms)
        for one in good
        if one.first_s is not None
    )
    figures = [
        ("time to first token, p50", quantile(firsts, 0.5), "ms"),
        ("time to first token, p99", quantile(firsts, 0.99), "ms"),
        ("between tokens, p50", quantile(gaps, 0.5), "ms"),
        ("between tokens, p99", quantile(gaps, 0.99), "ms"),
        ("output", sum(one.tokens for one in good) / seconds, "tokens/s"),
        (f"goodput (<= {ttft_ms:g} ms, <= {itl_ms:g} ms/token)", met / seconds, "requests/s"),
        ("failed", len(timings) - len(good), "requests"),
    ]
    return [
        {"figure": f"{name}: {what}", "value": value, "unit": unit, "n": len(timings)} for what, value, unit in figures
    ]


def bodies_of(count: int, model: str, prompt_tokens: int, output_tokens: int, vocab_size: int) -> list[dict[str, Any]]:
    """The requests, the same in every run."""
    rng = random.Random("serve_http")
    more = {"model": model} if model else {}
    return [
        {
            **more,
            "prompt": [
                rng.randrange(16, vocab_size) for _ in range(rng.randint(max(1, prompt_tokens // 2), prompt_tokens))
            ],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1.0,
        }
        for _ in range(count)
    ]


class FakeServer:
    """hone's front over the steady engine of the tests, in processes of its own."""

    def __init__(self, step_ms: float, fronts: int) -> None:
        self._fronts = fronts
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text("{}")
        code = (
            "from hone.serve.http import ServerSpec, serve\nfrom tests.serve.fake_engine import build_steady\n"
            f"serve({self._folder.name!r}, ServerSpec(port=0, max_queue=100000, api_server_count={fronts}), build=build_steady)\n"
        )
        environment = {**os.environ, "HONE_FAKE_STEP_MS": str(step_ms), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        found = re.search(r"http://[\w.]+:\d+", self._process.stdout.readline())
        if found is None:
            raise SystemExit("the fake server did not start")
        self.url = found[0]

    def cpu_s(self) -> float:
        """Seconds of processor time of the front processes so far."""
        root = psutil.Process(self._process.pid)
        own = [root] if self._fronts == 1 else [one for one in root.children() if _listens(one)]
        return float(sum(sum(one.cpu_times()[:2]) for one in own))

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._folder.cleanup()


def _listens(process: psutil.Process) -> bool:
    return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="the server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--fake", action="store_true", help="hone's front over an engine without a model")
    parser.add_argument("--step-ms", type=float, default=18.0, help="a step of the fake engine")
    parser.add_argument("--streams", type=int, default=512, help="with --fake: streams at once")
    parser.add_argument("--fronts", type=int, default=1, help="with --fake: api_server_count")
    parser.add_argument("--clients", type=int, default=1, help="processes that send the load")
    parser.add_argument("--model", default="", help="the model's name, where the server needs one")
    parser.add_argument("--key", default="", help="API key")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 16.0, 64.0], help="requests/s")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--vocab-size", type=int, default=0, help="ids of prompts are below it; 256 with --fake, else 32000"
    )
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--itl-ms", type=float, default=50.0)
    parser.add_argument("--name", default="hone", help="what is measured, in the rows")
    parser.add_argument("--device", default="cpu", help="of the server, for the ledger")
    parser.add_argument("--no-ledger", action="store_true")
    options = parser.parse_args()
    if options.fake == bool(options.url):
        parser.error("give either a URL or --fake")
    fake = FakeServer(options.step_ms, options.fronts) if options.fake else None
    url = fake.url if fake else options.url.rstrip("/")
    vocab_size = options.vocab_size or (256 if fake else 32000)
    rows: list[dict[str, Any]] = []

    def load(count: int) -> list[dict[str, Any]]:
        return bodies_of(count, options.model, options.prompt_tokens, options.output_tokens, vocab_size)

    def run(bodies: list[dict[str, Any]], rate: float, seed: int) -> tuple[list[Timing], float]:
        return load_of(url, options.key, bodies, rate, seed, options.clients)

    def add(found: list[dict[str, Any]]) -> None:
        print(table(found), flush=True)
        more = {"fronts": options.fronts} if fake else {}
        rows.extend({**row, "engine": "fake" if fake else options.name, **more} for row in found)

    try:
        run(load(4 * options.clients), float("inf"), 0)  # warm
        if fake:
            short = [{**body, "max_tokens": 1} for body in load(options.streams)]
            before = fake.cpu_s()
            run(short, float("inf"), 0)
            request_s = (fake.cpu_s() - before) / len(short)  # with its first and last token
            before = fake.cpu_s()
            timings, seconds = run(load(options.streams), float("inf"), 0)
            found = rows_of(timings, seconds, f"{options.streams} streams", options.ttft_ms, options.itl_ms)
            gaps = [gap for one in timings for gap in one.gaps_s]
            name, count = f"{options.streams} streams", sum(one.tokens for one in timings)
            spent_s = fake.cpu_s() - before
            cost_us = 1e6 * spent_s / count
            more_us = 1e6 * (spent_s - request_s * len(timings)) / (count - len(timings))
            part = {"figure": f"{name}: of the engine's rate", "value": options.step_ms / 1000 * len(gaps) / sum(gaps)}
            cost = {"figure": f"{name}: the front's processor time", "value": cost_us, "unit": "us/token"}
            further = {"figure": f"{name}: the same, without requests", "value": more_us, "unit": "us/token"}
            asked = {"figure": f"{name}: the same, of a request", "value": 1000 * request_s, "unit": "ms"}
            add([{**row, "n": len(timings)} for row in (*found, {**part, "unit": ""}, cost, further, asked)])
        for seed, rate in enumerate(options.rates):
            timings, seconds = run(load(options.requests), rate, seed)
            add(rows_of(timings, seconds, f"{rate:g} requests/s", options.ttft_ms, options.itl_ms))
    finally:
        if fake:
            fake.close()
    if not options.no_ledger:
        append("serve_http", rows, options.device)


if __name__ == "__main__":
    main()
