"""The process that tokenizes long texts and renders chat templates: `python -m hone.serve.http.texts.child FOLDER [TEMPLATE]`.

Jobs arrive on standard input and answers leave on standard output, as length-prefixed pickles. Each job runs with a limit
of address space, so a text or a template that needs more fails alone; the parent enforces the deadline by a kill.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from hone.serve.http.processes.messages import framed, read_message

KEPT_BYTES = 256 * 2**20
"""Resident memory above that of the start after which the process ends itself: allocators keep what a long text needed."""


def encoded(tokenizer: Any, texts: list[str], special: bool) -> tuple[str, Any]:
    """("ids", the ids of each text as bytes of 32 bits)."""
    return "ids", [array("I", ids).tobytes() for ids in tokenizer.encode_batch(texts, special)]


def rendered(
    tokenizer: Any, messages: list[Any], opened: bool, variables: dict[str, Any], limit: int
) -> tuple[str, Any]:
    """("text", the prompt of `messages`), or ("error", why it has none: `limit` is its most characters)."""
    from hone.base.errors import HoneError

    try:
        text = tokenizer.chat(messages, add_generation_prompt=opened, **variables)
    except HoneError as error:
        return "error", error.what[:2000]
    if len(text) > limit:
        return "error", f"the chat template writes {len(text)} characters, more than {limit}"
    text.encode("utf8")
    return "text", text


JOBS = {"encode": encoded, "render": rendered}


def answer(tokenizer: Any, kind: str, memory_bytes: int, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """The answer to one job, run with at most `memory_bytes` of new address space."""
    _limit_memory(memory_bytes)
    try:
        return JOBS[kind](tokenizer, *arguments)
    except MemoryError:
        return "error", f"more than {memory_bytes >> 20} MiB of memory are needed"
    except Exception as error:  # template, variables and texts are not hone's code
        return "error", f"{type(error).__name__}: {str(error)[:500]}"


def _limit_memory(more: int) -> None:
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = pages * mmap.PAGESIZE + more
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _resident() -> int:
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def main() -> None:
    """Answers jobs until standard input ends or too much memory is kept."""
    replies: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(os, "nice"):
        os.nice(5)  # streams to clients come first
    from hone.serve.http.texts.opening import read_tokenizer

    tokenizer = read_tokenizer(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")

    def send(message: tuple[str, Any]) -> None:
        try:
            replies.write(framed(message))
            replies.flush()
        except BrokenPipeError:  # the server was killed; an orderly end would write the rest once more, and complain
            os._exit(0)

    send(("ready", None))
    start = _resident()
    while True:
        try:
            job = read_message(sys.stdin.buffer)
        except EOFError:  # the server has ended
            return
        reply = answer(tokenizer, *job)
        _limit_memory(2**40)
        stays = _resident() - start < KEPT_BYTES
        send((reply[0] if stays else f"last {reply[0]}", reply[1]))
        if not stays:
            return


if __name__ == "__main__":
    main()
