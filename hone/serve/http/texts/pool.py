"""The HTTP process's handle of its text processes: jobs with deadlines; one that fails is killed and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from array import array
from pathlib import Path
from typing import Any

from hone.base.errors import MachineError
from hone.serve.http.processes.messages import LENGTH, framed

_START_S, _END_S = 120.0, 5.0
ENCODE_S, ENCODE_BYTES = 60.0, 6 * 2**30
RENDER_S, RENDER_BYTES, RENDER_CHARS = 5.0, 512 * 2**20, 64 * 2**20
"""Deadlines (seconds), new memory (bytes) and output (characters) of one job."""


class TextError(Exception):
    """A text or a template for which there is no answer; the message says why."""


class _Child:
    """One process; `ask` gives it one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, words: list[str]) -> _Child:
        root = Path(__file__).resolve().parents[4]
        known = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else str(root)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hone.serve.http.texts.child", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the server only, which ends this process
            limit=2**20,
        )
        self = cls(process)
        try:
            await asyncio.wait_for(self._receive(), _START_S)
        except (EOFError, OSError, TimeoutError):
            await self.end()
            raise MachineError("the process that tokenizes did not start", fix="see its last lines above") from None
        except BaseException:
            await self.end()
            raise
        return self

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, message: Any) -> tuple[str, Any]:
        """The answer to a job. Raises EOFError or OSError when the process ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(framed(message))
        await self._process.stdin.drain()
        return await self._receive()

    async def _receive(self) -> tuple[str, Any]:
        assert self._process.stdout is not None
        try:
            (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            return pickle.loads(await self._process.stdout.readexactly(length))  # type: ignore[no-any-return]
        except asyncio.IncompleteReadError:
            raise EOFError from None

    async def ended(self) -> int:
        """Waits for a process whose output has ended, then as `end`; its exit code or minus the signal that ended it."""
        with contextlib.suppress(TimeoutError):  # to kill it at once could take its exit code from asyncio's watcher
            await asyncio.wait_for(self._process.wait(), _END_S)
        return await self.end()

    async def end(self) -> int:
        """Kills the process; its exit code, or minus the signal that ended it before."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        code = await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]
        return code


class TextPool:
    """`count` text processes for the tokenizer of `folder`. Long texts never occupy the last one, which templates need."""

    def __init__(
        self,
        folder: Path | str,
        chat_template: str = "",
        *,
        count: int = 2,
        encode_s: float = ENCODE_S,
        encode_bytes: int = ENCODE_BYTES,
        render_s: float = RENDER_S,
        render_bytes: int = RENDER_BYTES,
    ) -> None:
        self._words = [str(folder), *([chat_template] if chat_template else [])]
        self._count = count
        self._encode = (encode_s, encode_bytes)
        self._render = (render_s, render_bytes)
        self._idle: list[_Child] = []
        self._running: set[_Child] = set()
        self._slots = asyncio.Semaphore(count)
        self._long = asyncio.Semaphore(max(1, count - 1))

    async def start(self) -> None:
        """Starts all processes. Raises MachineError when one does not start."""
        self._idle = list(await asyncio.gather(*(_Child.start(self._words) for _ in range(self._count))))

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(child.end() for child in [*self._idle, *self._running]))
        self._idle.clear()

    async def encode(self, texts: list[str], special: bool) -> list[list[int]]:
        """Token ids of each text, special tokens of the post-processor with `special`. Raises TextError."""
        async with self._long:
            packed = await self._run("encode", *self._encode, (texts, special))
        ids = [array("I") for _ in packed]
        for one, data in zip(ids, packed, strict=True):
            one.frombytes(data)
        return [one.tolist() for one in ids]

    async def render(self, messages: list[dict[str, Any]], opened: bool, variables: dict[str, Any]) -> str:
        """The prompt of `messages` by the chat template. Raises TextError."""
        text: str = await self._run("render", *self._render, (messages, opened, variables, RENDER_CHARS))
        return text

    async def _run(self, kind: str, seconds: float, memory_bytes: int, arguments: tuple[Any, ...]) -> Any:
        async with self._slots:
            child = self._idle.pop() if self._idle else await _Child.start(self._words)
            if not child.alive:  # ended while idle, by the system for instance
                await child.end()
                child = await _Child.start(self._words)
            self._running.add(child)
            answered = False
            try:
                async with asyncio.timeout(seconds):
                    what, value = await child.ask((kind, memory_bytes, arguments))
                answered = True
            except TimeoutError:
                raise TextError(f"it takes more than {seconds:g} s") from None
            except (EOFError, OSError):
                raise TextError(await self._ending(child, memory_bytes)) from None
            finally:
                self._running.discard(child)
                if answered and not what.startswith("last "):
                    self._idle.append(child)
                else:
                    await child.end()
        if what.removeprefix("last ") == "error":
            raise TextError(value)
        return value

    async def _ending(self, child: _Child, memory_bytes: int) -> str:
        code = await child.ended()
        by_memory = code in (-signal.SIGABRT, -signal.SIGSEGV)  # Rust and C abort when memory cannot be had
        why = f"more than {memory_bytes >> 20} MiB of memory are needed" if by_memory else f"exit code {code}"
        return f"the process for it ended: {why}"
