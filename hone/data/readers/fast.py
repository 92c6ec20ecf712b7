"""Fast: main text of web pages by resiliparse, without the boxes around articles, which are recognized by class name.

Where that loses most of a page's long lines, the page goes to `careful`: a cheap check, because the text of the whole page is
one more pass over the tree that is there.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field

from hone.base.errors import MissingExtra
from hone.data.readers.careful import Careful
from hone.data.readers.extractor import Extractor

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
