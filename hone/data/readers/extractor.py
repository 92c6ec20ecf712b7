"""Extractor: extracts the main text of an HTML page, and decodes the page first."""

from __future__ import annotations

import numpy as np

from hone.base.table import Technique
from hone.data.readers.documents import SAMPLE_CHARS
from hone.data.readers.encodings import decode_page
from hone.feed.files.streams import Unreadable

MAX_DEPTH = 512
"""Deepest nesting of elements, as in browsers built on Blink. Extractors take time quadratic in the depth: minutes at 100,000."""
_OPEN, _SLASH = ord("<"), ord("/")


class Extractor(Technique):
    """Extracts the main text of an HTML page."""

    def extract(self, page: str) -> str:
        """The main text of `page`, decoded HTML; '' when it has none. Raises ValueError for text that is not a page."""
        raise NotImplementedError


def page_text(raw: bytes, extractor: Extractor, served: str | None = None) -> str:
    """Main text of an HTML page in bytes; `served` is the encoding declared by the server.

    Raises MissingExtra, ValueError, and Unreadable for a page whose elements are nested deeper than MAX_DEPTH.
    """
    page = decode_page(raw, served)
    if _may_be_deep(page) and _is_deep(page):
        raise Unreadable("nested_too_deeply", page[:SAMPLE_CHARS])
    return extractor.extract(page)


def _may_be_deep(page: str) -> bool:
    """Whether at any place more than MAX_DEPTH tags are open; elements without an end tag count too."""
    if page.count("<") <= MAX_DEPTH:
        return False
    data = np.frombuffer(page.encode("utf8", "replace") + b" ", np.uint8)
    following = data[np.flatnonzero(data[:-1] == _OPEN) + 1]
    letters = (following | 32) - ord("a") < 26  # uint8 wraps around, so that only letters are below 26
    return int(np.cumsum(letters.astype(np.int32) - (following == _SLASH)).max(initial=0)) > MAX_DEPTH


def _is_deep(page: str) -> bool:
    """Whether an element of the parsed page is nested inside more than MAX_DEPTH others."""
    from resiliparse.parse.html import HTMLTree

    level = [HTMLTree.parse(page).document]
    for _ in range(MAX_DEPTH + 2):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node):
    child = node.first_child
    while child is not None:
        yield child
        child = child.next
