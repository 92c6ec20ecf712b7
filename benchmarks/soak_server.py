"""The server of `benchmarks.soak`: `hone serve` that poisons freed pages and counts what it holds.

`python -m benchmarks.soak_server FOLDER PORT FIELDS` (FIELDS: a ServerSpec as JSON). /metrics has more lines: "soak_..." of
the engine's process and "soak:..." of the HTTP process: live objects, tasks, and what the engine's tables hold.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import os
import sys
import threading
from typing import Any

from hone.base.errors import HoneError
from hone.measure.memory import give_back

WATCHED = ("Seq", "Request", "Output", "Constraint", "Job", "CompletionReply", "ChatReply", "Task", "Future", "socket")
"""Classes whose live objects are counted where a process rests."""


def live_objects() -> dict[str, int]:
    """Number of objects that the collector knows, and of those of WATCHED."""
    give_back()
    found = gc.get_objects()
    kinds = collections.Counter(type(one).__name__ for one in found)
    return {"objects": len(found), **{name.lower(): kinds[name] for name in WATCHED}}


def build(folder: str, spec: Any, device: str, max_queue: int) -> tuple[Any, Any]:
    """The engine of `hone serve`, with pages full of NaN from when nobody can reach them until they are given out again."""
    from hone.serve.http.server import build_engine

    engine, info = build_engine(folder, spec, device, max_queue)
    one: Any = engine
    free, stats = one.pool.free, one.stats

    def poisoned(pages: Any) -> Any:
        gone = free(pages)
        one.runner.cache.wipe(gone, float("nan"))
        return gone

    def figures() -> dict[str, float]:
        found = {**stats(), "soak_engine_pid": os.getpid()}
        if not one.has_work:
            one.pool.check()
            slots = one._builder._slots
            found |= {f"soak_{name}": count for name, count in live_objects().items()}
            found |= {"soak_seqs": len(one._seqs), "soak_slots": len(slots._held) + len(slots._free)}
            found["soak_compiling"] = len(one._constraints._compiling)
        return found

    one.pool.free, one.stats = poisoned, figures
    return engine, info


def main() -> None:
    from benchmarks import soak_server
    from hone.serve.http.metrics import ServerMetrics
    from hone.serve.http.server import serve
    from hone.serve.http.spec import ServerSpec

    folder, port, fields = sys.argv[1:]
    text = ServerMetrics.text

    def counted(self: ServerMetrics) -> bytes:
        rows = {**live_objects(), "tasks": len(asyncio.all_tasks()), "threads": threading.active_count()}
        return text(self) + "".join(f"soak:{name} {count}\n" for name, count in rows.items()).encode()

    ServerMetrics.text = counted  # type: ignore[method-assign]
    # `build` by the module's name: the engine's process imports it from there, not from this one's __main__.
    try:
        serve(folder, ServerSpec.read({**json.loads(fields), "port": int(port)}), build=soak_server.build)
    except HoneError as error:  # as the command line does
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
