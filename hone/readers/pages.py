"""Pages: the main text of HTML, by two extractors: one fast pass, and trafilatura's careful one."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np
from pydantic import Field

from hone.base.errors import MissingExtra
from hone.base.table import Technique
from hone.feed.files.streams import Unreadable
from hone.readers.documents import SAMPLE_CHARS
from hone.readers.encodings import decode_page

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


BOXES = ("caption", "newsletter", "share", "related", "credit", "cookie", "popular", "copyright")
"""Parts of class names of elements around or inside an article that are not part of its text."""
_SENTENCE_ENDS = tuple(".!?…。！？:;\"'”»’)]")
_LEAST_CHARS = 250
_MENU_CHARS = 60
_MENU_SHARE = 0.2
_AROUND = ("header", "footer", "nav", "aside", '[class*="comment"]', '[id*="comment"]')
"""Elements whose lines are not expected in the main text."""
_LONG_BYTES = 80
_ENOUGH_CHARS = 2000
"""Where so much was found, the page is not checked: pages that lose their article yield less."""
_LARGE_SHARE = 0.5
"""A text with a larger share of the page's characters is not doubted."""
_LABEL = re.compile(
    r"\W*(advert(isements?|s)?|(related|recommended|popular|latest|top|more)( (articles?|stories|posts|news|links|topics))?|"
    r"comments?|loading|share( this)?( (article|story|post|page))?|read more|sign up|subscribe( now)?|print|e-?mail|tweet|pin( it)?|"
    r"whatsapp|facebook|twitter|linkedin|pinterest|reddit|instagram|youtube|back to top|filed under|see more|show more|load more|"
    r"(more on|don'?t miss|you (may|might) also like|most (read|popular))( this)?|all rights reserved|sponsored( links)?|"
    r"follow us( on)?|tags?|categories|skip to (main )?content|video|photos?|image|gallery)\W*",
    re.IGNORECASE,
)


class Fast(Extractor):
    """One pass over the tree by resiliparse; removes boxes by class name, menus at the end and single labels; `careful` where little is left. Bevendorff et al. 2018."""

    paper: ClassVar[str] = "https://doi.org/10.1007/978-3-319-76941-7_83"

    headline: bool = Field(False, description="Keep the page's headline (h1) and header.")
    comments: bool = Field(False, description="Keep readers' comments.")
    boxes: tuple[str, ...] = Field(
        BOXES, description="Elements whose class name contains one of these words are left out."
    )
    tidy: bool = Field(True, description="Leave out lines that are labels of buttons, and a menu after the text.")

    doubt: float = Field(
        0.5,
        ge=0,
        le=1,
        description="A page with little text, of whose long lines a smaller share was kept, is read by `careful`; 0: none.",
    )

    def extract(self, page: str) -> str:
        """The main text of the HTML `page`; '' when it has none."""
        try:
            from resiliparse.parse.html import HTMLTree
        except ImportError:
            raise MissingExtra.of("reading HTML", "resiliparse", "data") from None
        tree = HTMLTree.parse(page)
        around = [] if self.headline else ["header", "h1"]
        boxes = [f'[class*="{word}"]' for word in self.boxes]
        text = self._plain(tree, [*around, "footer", *boxes])
        if boxes and len(text) < _LEAST_CHARS:  # the article itself may be in such an element
            whole = self._plain(tree, around)
            if len(whole) > 2 * len(text):
                text = whole
        if self.doubt and len(text) < _ENOUGH_CHARS and _share_kept(tree, text) < self.doubt:
            careful = Careful(comments=self.comments).extract(page)
            if len(careful) > len(text):
                return careful
        return tidied(text) if self.tidy else text

    def _plain(self, tree, skip: list[str]) -> str:
        from resiliparse.extract.html2text import extract_plain_text

        return extract_plain_text(
            tree,
            main_content=True,
            preserve_formatting=True,
            alt_texts=False,
            list_bullets=False,
            comments=self.comments,
            post_meta=False,
            skip_elements=skip,
        )


def _share_kept(tree, text: str) -> float:
    """The share of the bytes of the page's long lines that `text` has too; 1 for a page without any, or of which most is in `text`."""
    from resiliparse.extract.html2text import extract_plain_text

    whole = extract_plain_text(
        tree,
        main_content=False,
        preserve_formatting=True,
        alt_texts=False,
        list_bullets=False,
        skip_elements=[*_AROUND],
    )
    if len(whole) < _LEAST_CHARS or len(text) > _LARGE_SHARE * len(whole):
        return 1.0
    mine = {line.strip() for line in text.split("\n")}
    total = kept = 0
    for line in whole.split("\n"):
        line = line.strip()
        size = len(line) if line.isascii() else len(line.encode("utf8", "replace"))
        if size >= _LONG_BYTES:
            total += size
            kept += size * (line in mine)
    return kept / total if total else 1.0


def tidied(text: str) -> str:
    """`text` without lines that are labels of buttons or boxes, and without a menu at its end.

    A menu is a run of short lines that do not end like sentences; a run that is a large part of the text is kept.
    """
    lines = [line for line in text.split("\n") if not line or len(line) > _MENU_CHARS or not _LABEL.fullmatch(line)]
    end = len(lines)
    menu_chars = 0
    while end:
        line = lines[end - 1].strip()
        if line and (len(line) >= _MENU_CHARS or line.endswith(_SENTENCE_ENDS)):
            break
        menu_chars += len(line)
        end -= 1
    if menu_chars <= _MENU_SHARE * len(text):
        lines = lines[:end]
    return "\n".join(lines)
