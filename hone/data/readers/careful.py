"""Careful: main text of web pages by trafilatura, much slower than `fast`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hone.base.errors import MissingExtra
from hone.data.readers.extractor import Extractor


class Careful(Extractor):
    """trafilatura's rules over the whole tree, optionally compared with other algorithms. Barbaresi 2021, aclanthology 2021.acl-demo.15."""

    paper: ClassVar[str] = "https://aclanthology.org/2021.acl-demo.15/"

    comments: bool = Field(False, description="Keep readers' comments.")
    tables: bool = Field(True, description="Keep the text of tables.")
    second_opinion: bool = Field(
        False, description="Compare with two other algorithms where the first finds little; slower."
    )

    def extract(self, page: str) -> str:
        """The main text of the HTML `page`; '' when it has none."""
        try:
            import trafilatura
        except ImportError:
            raise MissingExtra.of("the careful extractor", "trafilatura", "data") from None
        text = trafilatura.extract(
            page,
            include_comments=self.comments,
            include_tables=self.tables,
            fast=not self.second_opinion,
        )
        return text or ""
