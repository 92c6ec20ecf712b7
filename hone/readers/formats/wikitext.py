"""Wikitext: the text of a page of MediaWiki without templates, tables, references, files, categories and markup."""

from __future__ import annotations

import html
import re

_COMMENT = re.compile(r"<!--.*?(-->|\Z)", re.DOTALL)
_LEFT_OUT = re.compile(
    r"<(ref|math|chem|gallery|timeline|imagemap|score|graph|mapframe|maplink|templatestyles|syntaxhighlight|source|hiero|indicator)\b"
    r"(?:[^<>/]|/(?!>))*(?:/>|>.*?(?:</\1\s*>|(?=\n\n|\Z)))",
    re.DOTALL | re.IGNORECASE,
)
_NOWIKI = re.compile(r"<nowiki\s*/>|<nowiki>(.*?)</nowiki>", re.DOTALL | re.IGNORECASE)
_BRACKET = re.compile(r"\{\{+|\}\}+|\[\[|\]\]|\{\||\|\}(?!\})")
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]*(\s[^<>]*)?/?>")
_BREAK = re.compile(r"<(br|p|hr)\b[^<>]*>", re.IGNORECASE)
_EXTERNAL = re.compile(r"\[(?:https?:|ftp:|mailto:|//)\S*?(?:\s+([^\]\n]*))?\]")
_QUOTES = re.compile(r"'{2,5}")
_HEADING = re.compile(r"^(={1,6})\s*(.*?)\s*\1\s*$")
_MAGIC = re.compile(r"__[A-Z]{3,}__")
_EMPTY = re.compile(r"\(\s*[,;]?\s*\)")
_SPACE = re.compile(r"[ \t\xa0]{2,}")
_BEFORE_MARK = re.compile(r" ([,.;:)])")
_MARK = "\ue000"
"""Stands for text between <nowiki>, which has no markup; a private character that articles do not have."""


def cleaned(text: str) -> str:
    """The prose of wikitext: links by their labels, lists and headings as lines; sections that are left empty lose their heading."""
    text = _COMMENT.sub("", text)
    kept: list[str] = []

    def keep(found: re.Match) -> str:
        kept.append(found.group(1) or "")
        return _MARK

    text = _NOWIKI.sub(keep, text.replace(_MARK, ""))
    if "<" in text:
        text = _LEFT_OUT.sub("", text)
    text = _unbracketed(text)
    if "[" in text:
        text = _EXTERNAL.sub(lambda found: found.group(1) or "", text)
    if "<" in text:
        text = _TAG.sub("", _BREAK.sub("\n", text))
    if "''" in text:
        text = _QUOTES.sub("", text)
    if "__" in text:
        text = _MAGIC.sub("", text)
    # What templates leave behind: empty brackets, spaces before marks.
    text = _BEFORE_MARK.sub(r"\1", _SPACE.sub(" ", _EMPTY.sub("", html.unescape(text))))
    text = _without_empty_sections(text)
    if kept:
        values = iter(kept)
        text = re.sub(_MARK, lambda found: next(values, ""), text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _unbracketed(text: str) -> str:
    """`text` without templates and tables, and with links by their labels. Brackets are matched with a stack, in one pass.

    An opening bracket that is never closed is removed alone, so that it does not cost the rest of the page.
    """
    # Each level: (what opened it, its text so far).
    levels: list[tuple[str, list[str]]] = [("", [])]
    place = 0
    for found in _BRACKET.finditer(text):
        mark = found.group()
        levels[-1][1].append(text[place : found.start()])
        place = found.end()
        if mark == "{|" or mark == "[[":
            levels.append((mark, []))
        elif mark[0] == "{":
            levels += [("{{", []) for _ in range(len(mark) // 2)]
        else:
            for _ in range(1 if mark in ("|}", "]]") else len(mark) // 2):
                _close(levels, {"|": "{|", "]": "[[", "}": "{{"}[mark[0]])
    levels[-1][1].append(text[place:])
    while len(levels) > 1:
        _, parts = levels.pop()
        levels[-1][1].extend(parts)
    return "".join(levels[0][1])


def _close(levels: list[tuple[str, list[str]]], opened: str) -> None:
    """Closes the innermost level that `opened` began; levels inside of it that were not closed are part of its text."""
    at = next(
        (number for number in range(len(levels) - 1, max(len(levels) - 40, 0), -1) if levels[number][0] == opened), 0
    )
    if not at:
        return
    parts = [part for _, inner in levels[at:] for part in inner]
    del levels[at:]
    if opened == "[[":
        levels[-1][1].append(_label("".join(parts)))


def _label(link: str) -> str:
    """The text that a link shows; '' for files, categories and links to other languages."""
    target, bar, label = link.partition("|")
    space = target.partition(":")[0].strip().lower() if ":" in target[1:] else ""
    if space and not target.startswith(":") and (space in _SPACES or _LANGUAGE.fullmatch(space)):
        return ""
    if not bar:
        return target.lstrip(":").replace("_", " ").partition("#")[0]
    return label.rpartition("|")[2]


_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?")
_SPACES = frozenset(
    [
        "file",
        "image",
        "media",
        "category",
        "datei",
        "bild",
        "kategorie",
        "fichier",
        "catégorie",
        "archivo",
        "imagen",
        "categoría",
        "файл",
        "изображение",
        "категория",
        "ファイル",
        "画像",
        "カテゴリ",
        "文件",
        "图像",
        "分类",
        "分類",
        "檔案",
        "immagine",
        "categoria",
        "imagem",
        "ficheiro",
        "arquivo",
        "bestand",
        "afbeelding",
        "categorie",
        "plik",
        "grafika",
        "kategoria",
        "fil",
        "kategori",
        "soubor",
        "fișier",
        "αρχείο",
        "κατηγορία",
        "파일",
        "그림",
        "분류",
        "ملف",
        "تصنيف",
        "קובץ",
        "קטגוריה",
        "dosya",
    ]
)
"""Prefixes of files and categories in the largest Wikipedias, in small letters."""


def _without_empty_sections(text: str) -> str:
    """Headings as lines; without those that no text follows before the next heading of the same or a higher level."""
    lines = text.split("\n")
    out: list[str] = []
    level_below = 7  # of the section that follows and is empty so far
    has_text = False
    for line in reversed(lines):
        found = _HEADING.match(line) if line[:1] == "=" else None
        if not found:
            line = line.lstrip("*#:;").strip()
            line = "" if line[:4] == "----" else line
            out.append(line)
            has_text |= bool(line)
            continue
        level = len(found.group(1))
        if has_text or (level_below < 7 and level < level_below):
            out.append(found.group(2))
            level_below = level
        has_text = False
    return "\n".join(reversed(out))
