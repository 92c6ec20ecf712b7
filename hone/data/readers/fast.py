"""Fast: main text of web pages by resiliparse, without the boxes around articles, which are recognized by class name."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field

from hone.base.errors import MissingExtra
from hone.data.readers.extractor import Extractor

BOXES = ("caption", "newsletter", "share", "related", "credit", "cookie", "popular", "copyright")
"""Parts of class names of elements around or inside an article that are not part of its text."""
_SENTENCE_ENDS = tuple(".!?…。！？:;\"'”»’)]")
_LEAST_CHARS = 250
_MENU_CHARS = 60
_MENU_SHARE = 0.2
_LABEL = re.compile(
    r"\W*(advert(isements?|s)?|(related|recommended|popular|latest|top|more)( (articles?|stories|posts|news|links|topics))?|"
    r"comments?|loading|share( this)?( (article|story|post|page))?|read more|sign up|subscribe( now)?|print|e-?mail|tweet|pin( it)?|"
    r"whatsapp|facebook|twitter|linkedin|pinterest|reddit|instagram|youtube|back to top|filed under|see more|show more|load more|"
    r"(more on|don'?t miss|you (may|might) also like|most (read|popular))( this)?|all rights reserved|sponsored( links)?|"
    r"follow us( on)?|tags?|categories|skip to (main )?content|video|photos?|image|gallery)\W*",
    re.IGNORECASE,
)


class Fast(Extractor):
    """One pass over the tree by resiliparse; removes boxes by class name, menus at the end and single labels. Bevendorff et al. 2018."""

    paper: ClassVar[str] = "https://doi.org/10.1007/978-3-319-76941-7_83"

    headline: bool = Field(False, description="Keep the page's headline (h1) and header.")
    comments: bool = Field(False, description="Keep readers' comments.")
    boxes: tuple[str, ...] = Field(
        BOXES, description="Elements whose class name contains one of these words are left out."
    )
    tidy: bool = Field(True, description="Leave out lines that are labels of buttons, and a menu after the text.")

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
