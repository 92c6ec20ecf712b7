"""One front: everything between a listening socket and the engine's handle, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.base.run import Run
from hone.serve.device.heap import frozen_heap
from hone.serve.http.app import build_app
from hone.serve.http.chat_forms import Parsers
from hone.serve.http.defaults import generation_defaults
from hone.serve.http.edge.cors import with_cors
from hone.serve.http.edge.guard import Limits, guarded_protocol, raised_file_limit
from hone.serve.http.endpoints.embeddings import pooling_of
from hone.serve.http.front import Front, FrontSettings
from hone.serve.http.processes.board import FrontBoard
from hone.serve.http.processes.link import EngineLink
from hone.serve.http.processes.replicas import Replicas
from hone.serve.http.prompts import Prompts
from hone.serve.http.spec import API_KEY_VARIABLE, ServerSpec
from hone.serve.http.texts.opening import read_tokenizer
from hone.serve.http.texts.pool import TextPool

if TYPE_CHECKING:
    import uvicorn

_TELL_S = 0.25


class OneFront:
    """The front of the model in `folder` for `spec`, read from disk and ready for an engine."""

    def __init__(self, folder: Path, spec: ServerSpec, run: Run) -> None:
        self._folder, self._spec = folder, spec
        self.tokenizer = read_tokenizer(folder, spec.chat_template)
        self.defaults = generation_defaults(folder, spec.generation_config)
        self._limits = Limits(
            min(max(1, spec.limits.max_connections // spec.processes.api_server_count), raised_file_limit() - 64),
            spec.limits.head_s,
            spec.limits.body_s,
        )
        self._texts: TextPool | None = None
        if self.tokenizer is None:
            run.say(f"{folder} has no tokenizer.json: prompts and replies are token ids only")
        else:
            self._texts = TextPool(folder, spec.chat_template, count=spec.limits.text_processes)
        if str(self.defaults):
            run.say(
                f"sampling defaults of generation_config.json: {self.defaults} (--generation_config=vllm leaves them out)"
            )

    async def run(
        self,
        engine: EngineLink | Replicas,
        sock: socket.socket,
        ready: Callable[[Stopping], None],
        board: FrontBoard | None = None,
        index: int = 0,
    ) -> None:
        """Serves on `sock` until a signal, or `Stopping`, ends it; calls `ready` once. With `board`, as front `index`."""
        try:
            front = self._front(engine, board, index)
            if self._texts is not None:
                await self._texts.start()
            try:
                await self._run(front, sock, ready)
            finally:
                if board is not None:
                    front.tell()
                    board.leave(index)
        finally:
            await self.close(engine)

    async def app(self, engine: EngineLink | Replicas) -> Any:
        """The ASGI application alone, for a server that is not hone's own; `close` ends what it uses."""
        front = self._front(engine, None, 0)
        if self._texts is not None:
            await self._texts.start()
        return with_cors(build_app(front), self._spec)

    async def close(self, engine: EngineLink | Replicas) -> None:
        """Ends the engine and the processes that handle texts."""
        await engine.stop()
        if self._texts is not None:
            await self._texts.close()

    def _front(self, engine: EngineLink | Replicas, board: FrontBoard | None, index: int) -> Front:
        spec = self._spec
        settings = FrontSettings(
            names=spec.served_model_name,
            api_key=spec.api_key or os.environ.get(API_KEY_VARIABLE, ""),
            max_queue=spec.max_queue,
            max_body_bytes=spec.max_body_bytes,
            body_timeout_s=spec.limits.body_s,
            stall_s=spec.stall_s,
            metrics_prefix=spec.metrics_prefix,
            pooling=pooling_of(self._folder, spec.pooling),
            parsers=Parsers.open(spec.tool_call_parser, spec.enable_auto_tool_choice, spec.reasoning_parser),
            defaults=self.defaults,
            adapters=spec.engine.lora.named_paths(),
            allow_runtime_lora_updating=spec.engine.lora.allow_runtime_lora_updating,
        )
        prompts = Prompts(
            self.tokenizer,
            vocab_size=engine.info.vocab_size,
            max_model_len=engine.info.max_model_len,
            texts=self._texts,
            max_output_tokens=self.defaults.max_new_tokens,
        )
        return Front(engine, prompts, settings, board, index)

    async def _run(self, front: Front, sock: socket.socket, ready: Callable[[Stopping], None]) -> None:
        import uvicorn

        config = uvicorn.Config(
            with_cors(build_app(front), self._spec),
            http=guarded_protocol(self._limits),
            ws="none",
            **self._spec.tls(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(self._spec.drain_s)),
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # uvicorn's handlers would exit before the engine stops
        stopping = Stopping(server, front)
        stopping.install(interrupts=front.board is None)  # beside others Ctrl-C comes from the supervisor
        front.engine.on_death = stopping.drain
        running = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(stopping)
        telling = asyncio.create_task(_tell(front))
        try:
            with frozen_heap():
                await running
        finally:
            telling.cancel()


async def _tell(front: Front) -> None:
    while front.board is not None:
        front.tell()
        await asyncio.sleep(_TELL_S)


class Stopping:
    """Shutdown on signals: SIGTERM lets requests finish, Ctrl-C ends them, a second Ctrl-C does not wait for clients."""

    def __init__(self, server: uvicorn.Server, front: Front) -> None:
        self._server = server
        self._front = front

    def install(self, *, interrupts: bool) -> None:
        """Installs handlers for SIGTERM, and SIGINT, on the running event loop (possible in the main thread only)."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            if interrupts:
                loop.add_signal_handler(signal.SIGINT, self.interrupt)
            loop.add_signal_handler(signal.SIGTERM, self.drain)

    def drain(self) -> None:
        """Rejects new requests; running ones finish."""
        self._front.drain()
        self._server.should_exit = True

    def interrupt(self) -> None:
        """Ends running requests with an error; at the second call, without waiting for their clients."""
        if self._front.draining and self._server.should_exit:
            self._server.force_exit = True
        self._front.engine.fail_all("the server was stopped")
        self.drain()
