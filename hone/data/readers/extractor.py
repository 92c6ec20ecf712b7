"""Extractor: what takes the main text out of an HTML page, and the page's way from bytes to it."""

from __future__ import annotations

from hone.base.table import Technique
from hone.data.readers.encodings import decode_page


class Extractor(Technique):
    """Main text of web pages."""

    def extract(self, page: str) -> str:
        """The main text of the HTML `page`; '' when it has none. Raises MissingExtra, ValueError for what is no page."""
        raise NotImplementedError


def page_text(raw: bytes, extractor: Extractor, served: str | None = None) -> str:
    """Main text of an HTML page in bytes; `served` is the encoding the server named. Raises MissingExtra, ValueError."""
    return extractor.extract(decode_page(raw, served))
