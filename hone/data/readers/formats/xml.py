"""XML: dumps of MediaWiki page by page, and any other XML by its elements or as one text; both are streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hone.data.readers.documents import Fault, Noted, Options, RawText
from hone.data.readers.formats.wikitext import cleaned
from hone.data.readers.formats.xml_events import Event, events
from hone.data.readers.rows import described
from hone.data.readers.texts import pieces
from hone.feed.files.listing import File
from hone.feed.files.streams import Salvage, Unreadable, open_stream

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
