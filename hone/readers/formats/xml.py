"""XML: dumps of MediaWiki page by page, and any other by its elements or as one text; a streaming parser refuses bombs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol
from xml.parsers import expat

from hone.feed.files.listing import File
from hone.feed.files.streams import Salvage, Unreadable, open_stream
from hone.readers.documents import SAMPLE_CHARS, Fault, Noted, Options, RawText, described
from hone.readers.formats.wikitext import cleaned
from hone.readers.texts import pieces

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


MAX_TEXT_CHARS = 64 << 20
"""Text of one element, or of a document without elements of the wanted name."""
_INLINE = frozenset(
    [
        "a",
        "b",
        "i",
        "u",
        "em",
        "strong",
        "sub",
        "sup",
        "span",
        "hi",
        "emph",
        "ref",
        "link",
        "xref",
        "italic",
        "bold",
        "code",
        "tt",
        "ext-link",
    ]
)
_PAGE_FIELDS = ("title", "ns", "id", "timestamp", "text", "redirect")


def read_xml(file: File, options: Options) -> Iterator[RawText | Fault | Noted]:
    """The articles of a MediaWiki dump, wikitext cleaned; of other XML the text of each element called `text_field`, or, where
    there is none, of the whole file. Redirects and pages that are no articles are noted. Of a truncated stream the
    documents before its end are returned, then EOFError is raised. Raises Unreadable.
    """
    with open_stream(file) as stream:
        found = events(Salvage(stream))
        first = next((event for event in found if event.name), None)
        if first is None:
            return
        if first.name == "mediawiki":
            yield from _pages(found, options)
        else:
            yield from _elements(found, options)


def _pages(found: Iterator[Event], options: Options) -> Iterator[RawText | Fault | Noted]:
    page: dict[str, str] = {}
    inside = ""
    parts: list[str] = []
    size = 0
    for event in found:
        if not event.name:
            if inside:
                size += len(event.text)
                if size <= MAX_TEXT_CHARS:
                    parts.append(event.text)
            continue
        if event.attributes is not None:
            if event.name == "page":
                page = {}
            elif event.name == "redirect":
                page["redirect"] = "yes"
            # Of ids the first is the page's; the others are those of its revision and author.
            inside = event.name if event.name in _PAGE_FIELDS and (event.name != "id" or "id" not in page) else ""
            parts, size = [], 0
            continue
        if event.name == inside:
            page[inside] = "".join(parts)
            if size > MAX_TEXT_CHARS:
                page["large"] = "yes"
        inside = ""
        if event.name == "page":
            yield _article(page, options)


def _article(page: dict[str, str], options: Options) -> RawText | Fault | Noted:
    if page.get("ns", "0") != "0":
        return Noted(f"MediaWiki namespace {page['ns'][:8]}")
    if "redirect" in page:
        return Noted("MediaWiki redirect")
    if "large" in page:
        return Fault("too_large", page.get("title", ""), numbered=True)
    about = {name: page.get(name) for name in options.metadata_fields}
    return RawText(cleaned(page.get("text", "")), metadata=described(about) if about else "")


def _elements(found: Iterator[Event], options: Options) -> Iterator[RawText | Fault]:
    """The text of the elements called `text_field`; of a document without one, everything."""
    everything: list[str] = []
    parts: list[str] = []
    depth = size = 0
    any_element = False
    error: BaseException | None = None
    try:
        for event in found:
            if depth or not any_element:
                added = _text(event)
                size += len(added)
                if size > MAX_TEXT_CHARS and not depth:
                    raise Unreadable(
                        "too_large", f"no element '{options.text_field}' in {MAX_TEXT_CHARS >> 20} MB of text"
                    )
                if size <= MAX_TEXT_CHARS:
                    (parts if depth else everything).append(added)
            if not event.name:
                continue
            if event.attributes is None:
                depth -= depth > 0
                if any_element and not depth and event.name == options.text_field:
                    yield (
                        RawText(_lines(parts))
                        if size <= MAX_TEXT_CHARS
                        else Fault("too_large", "", size, numbered=True)
                    )
            elif depth or event.name == options.text_field:
                if not depth:
                    any_element, parts, size = True, [], 0
                    everything = []
                depth += 1
    except (EOFError, Unreadable) as stop:
        error = stop
    if not any_element:
        yield from pieces(_lines(everything), options.max_document_chars)
    if error:
        raise error


def _text(event: Event) -> str:
    """What an event adds to the text: elements but those inside of lines end a line."""
    if not event.name:
        return " ".join(event.text.split("\n")) if event.text.strip() else " " * bool(event.text)
    return "" if event.name in _INLINE else "\n"


def _lines(parts: list[str]) -> str:
    lines: list[Any] = [" ".join(line.split()) for line in "".join(parts).split("\n")]
    return "\n".join(line for line in lines if line)
