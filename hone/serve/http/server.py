"""`hone serve`: checks the port, starts the engine's process, serves HTTP until a signal, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict, Field

from hone.base.errors import MachineError, MissingExtra
from hone.base.run import Run
from hone.base.spec import Spec
from hone.model.folder import HUB, model_folder
from hone.serve.http.worker import Build, EngineFacts, EngineLike, EngineProcess
from hone.serve.spec import EngineSpec

if TYPE_CHECKING:
    import uvicorn

    from hone.serve.http.front import Front

API_KEY_VARIABLE = "HONE_API_KEY"


class ServerSpec(Spec):
    """How a model folder is served over HTTP."""

    renamed: ClassVar[dict[str, str | None]] = {"draft": "engine.draft", "dtype": "engine.dtype"}

    model_config = ConfigDict(coerce_numbers_to_str=True)  # --api_key=1234 is a text too

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every address of this machine.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 is any free port.")
    api_key: str = Field(
        "", description=f"Key clients must send; '' reads ${API_KEY_VARIABLE}, and without that, none."
    )
    served_model_name: str = Field("", description="Name of the model for clients; '' is the folder's name.")
    chat_template: str = Field("", description="Jinja file to use in place of the model's own chat template.")
    max_queue: int = Field(1024, ge=0, description="Sequences that may wait; more get 503 and Retry-After.")
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest request body.")
    stall_s: float = Field(30.0, gt=0, description="Seconds without a finished step after which /health is 503.")
    drain_s: float = Field(30.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    metrics_prefix: str = Field(
        "", pattern=r"^[a-z_]*$", description="Repeat every metric under this prefix too, e.g. vllm."
    )
    engine: EngineSpec = Field(EngineSpec(), description="The engine.")


def build_engine(folder: str, spec: EngineSpec, device: str, max_queue: int) -> tuple[EngineLike, EngineFacts]:
    """The engine of `serve`, made inside the worker process. Raises HoneError when the folder cannot be served.

    The HTTP process limits waiting requests and replies at once with 503 and Retry-After; the engine's limit is higher.
    """
    from hone.serve.engine import Engine

    engine = Engine(folder, spec, device=device)
    engine.max_waiting = max(spec.max_waiting, max_queue + engine.scheduler.max_num_seqs)
    return engine, EngineFacts(
        max_model_len=engine.max_model_len,
        vocab_size=engine.model.config.vocab_size,
        max_num_seqs=engine.scheduler.max_num_seqs,
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
    spec = spec.model_copy(update={"served_model_name": spec.served_model_name or _name_of(folder)})
    folder = model_folder(folder)
    with listen(spec.host, spec.port) as sock, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(folder, spec, run, sock, build))


def _name_of(folder: Path | str) -> str:
    """The model's default name for clients: the folder's name, or OWNER/NAME of a model on the Hub."""
    text = str(folder)
    return text.removeprefix(HUB) if text.startswith(HUB) else Path(folder).resolve().name


def listen(host: str, port: int) -> socket.socket:
    """A socket listening on `host`:`port`. Raises MachineError when that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MachineError(f"no address for host '{host}': {error.strerror}", fix="try --host=127.0.0.1") from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    import uvicorn

    from hone.serve.http.app import build_app
    from hone.serve.http.front import Front, FrontSettings
    from hone.serve.http.prompts import Prompts, read_tokenizer

    started = time.monotonic()
    tokenizer = read_tokenizer(folder, spec.chat_template)
    if tokenizer is None:
        run.say(f"{folder} has no tokenizer.json: prompts and replies are token ids only")
    options = {"folder": str(folder), "spec": spec.engine, "device": run.device, "max_queue": spec.max_queue}
    engine = await EngineProcess.start(build, options)
    if engine.facts.sizes:
        run.say(engine.facts.sizes)
    try:
        name = spec.served_model_name
        settings = FrontSettings(
            names=(name,),
            api_key=spec.api_key or os.environ.get(API_KEY_VARIABLE, ""),
            max_queue=spec.max_queue,
            max_body_bytes=spec.max_body_bytes,
            stall_s=spec.stall_s,
            metrics_prefix=spec.metrics_prefix,
        )
        prompts = Prompts(tokenizer, vocab_size=engine.facts.vocab_size, max_model_len=engine.facts.max_model_len)
        front = Front(engine, prompts, settings)
        config = uvicorn.Config(
            build_app(front),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(spec.drain_s)),
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # uvicorn's handlers would exit before the engine stops
        signals = _Signals(server, front)
        signals.install()
        engine.on_death = signals.drain
        running = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if server.started:
            print(_ready_line(name, sock, tokenizer is not None, time.monotonic() - started), flush=True)
        await running
    finally:
        await engine.stop()
    if engine.death is not None:
        raise MachineError(
            engine.death,
            fix="see its last lines above, then start the server again (smaller --engine.* if memory ran out)",
        )


def _ready_line(name: str, sock: socket.socket, has_tokenizer: bool, seconds: float) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    prompt = '"Once upon a time"' if has_tokenizer else "[1, 2, 3]"
    return (
        f"serving {name} on http://{host}:{port} (ready in {seconds:.1f} s), try: curl http://{host}:{port}/v1/completions "
        f"-H 'Content-Type: application/json' -d '{{\"prompt\": {prompt}, \"max_tokens\": 32}}'"
    )


class _Signals:
    """Shutdown on signals: SIGTERM lets requests finish, Ctrl-C ends them, a second Ctrl-C does not wait for clients."""

    def __init__(self, server: uvicorn.Server, front: Front) -> None:
        self._server = server
        self._front = front

    def install(self) -> None:
        """Installs handlers for SIGINT and SIGTERM on the running event loop (possible in the main thread only)."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, self.interrupt)
            loop.add_signal_handler(signal.SIGTERM, self.drain)

    def drain(self) -> None:
        """Rejects new requests; running ones finish."""
        self._front.draining = True
        self._server.should_exit = True

    def interrupt(self) -> None:
        """Ends running requests with an error; at the second call, without waiting for their clients."""
        if self._front.draining and self._server.should_exit:
            self._server.force_exit = True
        self._front.engine.fail_all("the server was stopped")
        self.drain()
