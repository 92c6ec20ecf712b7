"""Adapters loaded and unloaded in the engine's process: read in a thread, taken in between two steps."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from hone.base.errors import HoneError, SpecError
from hone.serve.http.processes.wire import Channel

if TYPE_CHECKING:
    from hone.serve.adapters.registry import Adapters

CALLS = ("load", "unload", "read")
"""Kinds of messages that are handled here; `read` comes from the reading thread."""


class AdapterCalls:
    """Answers each call by ("told", its number, HTTP status, text). Every method runs in the engine's thread."""

    def __init__(self, adapters: Adapters | None, inbox: queue.SimpleQueue[Any]) -> None:
        self._adapters, self._inbox = adapters, inbox

    def handle(self, kind: str, items: tuple[Any, ...], front: Channel) -> None:
        """One message: `items` begin with the call's number."""
        number, *rest = items
        try:
            if self._adapters is None:
                raise SpecError("the engine serves no adapters", fix="start it with --engine.lora.max_loras=N")
            if kind == "load":
                name, path, inplace = rest
                self._adapters.check_name(name, load_inplace=inplace)
                threading.Thread(target=self._read, args=(number, name, path, inplace, front), daemon=True).start()
            elif kind == "read":
                found, inplace = rest
                if isinstance(found, BaseException):
                    raise found
                self._adapters.add(found, load_inplace=inplace)
                front.send(("told", number, 200, ""))
            else:
                self._adapters.remove(rest[0], lambda: front.send(("told", number, 200, "")))
        except HoneError as error:
            from hone.serve.adapters.reading import NoAdapterError

            missing = isinstance(error, NoAdapterError) or kind == "unload"
            front.send(("told", number, 404 if missing else 400, str(error)))
        except Exception as error:
            front.send(("told", number, 500, f"internal error: {type(error).__name__}: {error}"))

    def _read(self, number: int, name: str, path: str, inplace: bool, front: Channel) -> None:
        """In a thread of its own: steps go on meanwhile."""
        assert self._adapters is not None
        try:
            found: Any = self._adapters.read(name, path)
        except Exception as error:
            found = error
        self._inbox.put(("read", (number, found, inplace), front))
