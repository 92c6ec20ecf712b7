"""`hone serve`: checks the port, starts the engine's process, serves HTTP until a signal, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.errors import MachineError, MissingExtra, SpecError
from hone.base.run import Run
from hone.model.folder import HUB, model_folder
from hone.serve.http.spec import ServerSpec
from hone.serve.http.worker import AFTER_DEATH, Build, EngineInfo, EngineLike, EngineProcess
from hone.serve.spec import EngineSpec

if TYPE_CHECKING:
    pass


def build_engine(
    folder: str,
    spec: EngineSpec,
    device: str,
    max_queue: int,
    clock: dict[str, Any] | None = None,
) -> tuple[EngineLike, EngineInfo]:
    """The engine of `serve`, made inside the worker process. Raises HoneError when the folder cannot be served.

    The HTTP process limits waiting requests and replies at once with 503 and Retry-After; the engine's limit is higher.
    """
    from hone.serve.device.clocked import clocked
    from hone.serve.device.metered import metered
    from hone.serve.engine import Engine

    own = Engine(folder, spec, device=device)
    own.max_waiting = max(spec.max_waiting, max_queue + own.scheduler.max_num_seqs)
    engine = metered(clocked(own, clock, device), device, spec.num_ranks)
    return engine, EngineInfo(
        max_model_len=engine.max_model_len,
        vocab_size=engine.model.config.vocab_size,
        max_num_seqs=engine.scheduler.max_num_seqs,
        eos_ids=engine.eos_ids,
        block_size=engine.pool.block_size,
        num_pages=engine.pool.num_pages,
        sizes=engine.sizes,
    )


def serve(
    folder: Path | str, spec: ServerSpec | None = None, *, run: Run | None = None, build: Build = build_engine
) -> None:
    """Serves the model in `folder` on `run.device` until Ctrl-C or SIGTERM; prints one line with the address when ready.

    Ctrl-C ends running requests with an error; SIGTERM lets them finish for `drain_s`. Raises MachineError when the
    port is taken (before the model is loaded) or the engine's process dies, ArtifactError for a folder without a model.
    """
    spec, run = spec or ServerSpec(), run or Run()
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra.of("the server", error.name or "fastapi", "serve") from None
    from hone.serve.http.chat_forms import Parsers

    Parsers.open(
        spec.tool_call_parser, spec.enable_auto_tool_choice, spec.reasoning_parser
    )  # before the model is loaded
    spec.tls()
    spec = spec.model_copy(update={"served_model_name": spec.served_model_name or (_name_of(folder),)})
    if taken := sorted(set(spec.engine.lora.named_paths()) & set(spec.served_model_name)):
        raise SpecError(
            f"lora_modules names an adapter '{taken[0]}', which is the model's own name: requests for it would get the base",
            fix="give the adapter another name, or the model one (served_model_name)",
        )
    folder = model_folder(folder)
    build = build if run.clock is None else partial(build, clock=run.clock)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        alone = spec.processes.api_server_count == spec.processes.data_parallel_size == 1
        if alone and spec.processes.autoscaler is None:
            sock = stack.enter_context(listen(spec.host, spec.port))
            asyncio.run(_serve(folder, spec, run, sock, build))
            return
        sockets = [
            stack.enter_context(sock) for sock in listen_together(spec.host, spec.port, spec.processes.api_server_count)
        ]
        _supervise(folder, spec, run, sockets, build)


def _name_of(folder: Path | str) -> str:
    """The model's default name for clients: the folder's name, or OWNER/NAME of a model on the Hub."""
    text = str(folder)
    return text.removeprefix(HUB) if text.startswith(HUB) else Path(folder).resolve().name


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that share `host`:`port`: the kernel divides connections among them. Raises MachineError."""
    if count == 1:
        return [listen(host, port)]
    with listen(host, port) as alone:  # refuses a port that another server listens on, also one that shares it
        port = alone.getsockname()[1]
    return [listen(host, port, shared=True) for _ in range(count)]


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket listening on `host`:`port`. Raises MachineError when that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MachineError(f"no address for host '{host}': {error.strerror}", fix="try --host=127.0.0.1") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"port {port} of {host} is in use",
                fix=f"stop the process that uses it, or choose another: --port={port + 1}",
            ) from None
        raise MachineError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            fix="use a port above 1023 and an address of this machine",
        ) from None
    return sock


async def _serve(folder: Path, spec: ServerSpec, run: Run, sock: socket.socket, build: Build) -> None:
    from hone.serve.http.processes.one_front import OneFront, Stopping

    started = time.monotonic()
    front = OneFront(folder, spec, run)
    options = {"folder": str(folder), "spec": spec.engine, "device": run.device, "max_queue": spec.max_queue}
    engine = await EngineProcess.start(build, options)
    if engine.info.sizes:
        run.say(engine.info.sizes)

    def ready(_: Stopping) -> None:
        print(ready_line(spec, sock, front.tokenizer is not None, time.monotonic() - started), flush=True)

    await front.run(engine, sock, ready)
    if engine.death is not None:
        raise MachineError(engine.death, fix=AFTER_DEATH)


def _supervise(folder: Path, spec: ServerSpec, run: Run, sockets: list[socket.socket], build: Build) -> None:
    from hone.serve.http.processes.elastic_supervisor import ElasticSupervisor
    from hone.serve.http.processes.supervisor import Supervisor
    from hone.serve.http.texts.opening import read_tokenizer

    if not hasattr(os, "memfd_create"):
        raise MachineError(
            "several fronts or replicas share memory and a port in ways of Linux",
            fix="leave api_server_count and data_parallel_size at 1",
        )
    started, has_tokenizer = time.monotonic(), read_tokenizer(folder, spec.chat_template) is not None

    def ready() -> None:
        print(ready_line(spec, sockets[0], has_tokenizer, time.monotonic() - started), flush=True)

    kind = Supervisor if spec.processes.autoscaler is None else ElasticSupervisor
    kind(folder, spec, run, sockets, build).serve(ready)


def ready_line(spec: ServerSpec, sock: socket.socket, has_tokenizer: bool, seconds: float) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    prompt = '"Once upon a time"' if has_tokenizer else "[1, 2, 3]"
    page = ", a page to chat is there" if has_tokenizer else ""
    url = f"{'https' if spec.ssl_certfile else 'http'}://{host}:{port}"
    return (
        f"serving {', '.join(spec.served_model_name)} on {url} (ready in {seconds:.1f} s){page}, try: curl {url}/v1/completions "
        f"-H 'Content-Type: application/json' -d '{{\"prompt\": {prompt}, \"max_tokens\": 32}}'"
    )
