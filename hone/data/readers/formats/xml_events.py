"""XML events: a streaming parser that refuses declared entities and deep nesting, so that no small file becomes a large one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol
from xml.parsers import expat

from hone.data.readers.documents import SAMPLE_CHARS
from hone.feed.files.streams import Unreadable

MAX_DEPTH = 512
_STEP = 1 << 18


class Bytes(Protocol):
    """A stream of bytes."""

    def read(self, size: int) -> bytes: ...


class Event(NamedTuple):
    """The start of an element (`name` without prefix, `attributes`), its end (attributes None), or text (no name)."""

    name: str
    text: str = ""
    attributes: dict[str, str] | None = None


def events(stream: Bytes, encoding: str | None = None) -> Iterator[Event]:
    """The events of an XML document. Raises Unreadable: 'bad_xml' at the first error, after the events before it,
    'entities_declared' for a document type that declares entities (none are expanded), 'nested_too_deeply'.
    """
    found: list[Event] = []
    depth = 0

    locals_: dict[str, str] = {}
    add, nothing = found.append, {}

    def local(name: str) -> str:
        return locals_.setdefault(name, name.rpartition(":")[2])

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise Unreadable("nested_too_deeply", name[:SAMPLE_CHARS])
        known = {local(key): text for key, text in attributes.items()} if attributes else nothing
        add(Event(locals_.get(name) or local(name), "", known))

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        add(Event(locals_.get(name) or local(name)))

    def refuse(name: str, *rest: Any) -> None:
        raise Unreadable("entities_declared", name[:SAMPLE_CHARS])

    parser = expat.ParserCreate(encoding)
    parser.buffer_text = True
    parser.buffer_size = 1 << 16
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = lambda text: found.append(Event("", text))
    parser.EntityDeclHandler = refuse
    try:
        while chunk := stream.read(_STEP):
            parser.Parse(chunk, False)
            yield from found
            found.clear()
        parser.Parse(b"", True)
        yield from found
    except expat.ExpatError as error:
        yield from found
        raise Unreadable("bad_xml", str(error)) from None


class Skip:
    """Whether events are inside of an element that is left out."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._depth = 0

    def over(self, event: Event) -> bool:
        """Whether to leave this event out; to be asked for every event in order."""
        if not event.name:
            return self._depth > 0
        if event.attributes is None:
            if self._depth:
                self._depth -= 1
                return True
            return False
        if self._depth or event.name in self._names:
            self._depth += 1
            return True
        return False
