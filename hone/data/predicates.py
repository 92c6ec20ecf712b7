"""Predicates over text columns, for expressions: substrings, regular expressions, words, and lists of domains and pages in files."""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any

import numpy as np

from hone.base.durable import input_file
from hone.base.errors import SpecError
from hone.base.lazy import lazy

pa = lazy("pyarrow")
compute = lazy("pyarrow.compute")

FUNCTIONS = {
    "contains": "number",
    "matches": "number",
    "words_in": "number",
    "subwords_in": "number",
    "domain": "text",
    "page": "text",
}
"""Name of each function and the kind of its value; the first argument is a column of text.

contains(url, 'casino'): whether one of the strings is in it. matches(url, '[?]id=[0-9]+'): whether the regular expression matches
somewhere; RE2's syntax, which has no backtracking, so that every expression takes time linear in the text. words_in(url, 'casino', 'poker'):
how many different ones of the words are among its words (runs of letters and digits, whatever the case). subwords_in: how many are in it,
in letters and digits alone. domain(url): the host; `domain(url) in file('list')` holds for the domains in the list and those below them.
page(url): host and path without scheme, 'www.' and query; `page(url) in file('list')` holds for the pages of the list and those below them.
"""
MAX_PATTERN_CHARS = 10_000
_HOST = r"(?i)^\s*(?:[a-z][a-z0-9+.-]*:)?(?://)?(?:[^/?#@]*@)?(?P<host>[^/:?#@\s]*)"
_PAGE = r"(?i)^\s*(?:[a-z][a-z0-9+.-]*:)?(?://)?(?:[^/?#@]*@)?(?:www\.)?(?P<page>[^?#\s]*)"
_MOST_LEVELS = 40


def check_pattern(pattern: str, text: str) -> None:
    """Raises SpecError for a regular expression that cannot be compiled; `text` is the expression that it is part of."""
    why = f"longer than {MAX_PATTERN_CHARS} characters" if len(pattern) > MAX_PATTERN_CHARS else ""
    if not why:
        try:
            compute.match_substring_regex(pa.array([""]), pattern)
        except (pa.ArrowInvalid, ValueError) as error:
            why = str(error).removeprefix("Invalid regular expression: ")
    if why:
        raise SpecError(
            f"'{text}': the regular expression '{pattern[:100]}' is not valid: {why}",
            fix="use RE2's syntax, which has no look-around and no back references; (?i) at its beginning ignores case",
        )


def entries(name: str) -> tuple[str, ...]:
    """The entries of a list file in lower case, one a line; text after '#' and blank lines are left out, and of lines with several
    words (as in a hosts file) the last counts. Raises SpecError for a file that is missing, unreadable or empty."""
    path = input_file(name, "the list")
    stat = path.stat()
    return _entries(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _entries(path: Path, size: int, time: int) -> tuple[str, ...]:
    try:
        with gzip.open(path, "rt", encoding="utf8") if path.suffix == ".gz" else open(path, encoding="utf8") as file:
            lines = (line.partition("#")[0].split() for line in file)
            found = tuple(dict.fromkeys(words[-1].lower() for words in lines if words))
    except (OSError, ValueError, EOFError) as error:
        raise SpecError(
            f"the list {path} cannot be read: {error}", fix="give it as UTF-8 text, one entry a line"
        ) from None
    if not found:
        raise SpecError(f"the list {path} has no entries", fix="leave it out or give the right file")
    return found


def _arrow(column: np.ndarray) -> Any:
    return (
        pa.array(column, pa.large_string())
        if column.dtype.kind == "O"
        else pa.array(column.astype(str)).cast(pa.large_string())
    )


def call(name: str, column: np.ndarray, words: tuple[str, ...]) -> np.ndarray:
    """The value of function `name` for a column (str or object [n]) and its other arguments."""
    texts = _arrow(column)
    if name == "contains":
        parts = [compute.match_substring(texts, word) for word in words]
        return functools.reduce(np.logical_or, (_numpy(part) for part in parts))
    if name == "matches":
        return _numpy(compute.match_substring_regex(texts, words[0]))
    if name == "domain":
        hosts = compute.struct_field(compute.extract_regex(texts, _HOST), "host")
        return _numpy(compute.utf8_rtrim(compute.utf8_lower(hosts), "."))
    if name == "page":
        pages = compute.struct_field(compute.extract_regex(texts, _PAGE), "page")
        return _numpy(compute.utf8_rtrim(compute.utf8_lower(pages), "/"))
    small = compute.utf8_lower(texts)
    if name == "words_in":
        return _count_words(small, words)
    bare = compute.replace_substring_regex(small, r"[^\pL\pN]+", "")
    return functools.reduce(np.add, (_numpy(compute.match_substring(bare, word)).astype(np.int64) for word in words))


def _numpy(array: Any) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _count_words(texts: Any, words: tuple[str, ...]) -> np.ndarray:
    """int64 [n]: different ones of `words` among the words of each text."""
    parts = compute.split_pattern_regex(texts, r"[^\pL\pN]+")
    which = compute.index_in(parts.flatten(), value_set=pa.array(words, pa.large_string()))
    owner = np.repeat(np.arange(len(texts)), np.diff(parts.offsets.to_numpy()))
    hit = _numpy(which.is_valid())
    pairs = np.unique(np.stack([owner[hit], _numpy(which.drop_null())]), axis=1)
    return np.bincount(pairs[0], minlength=len(texts))


def listed(column: np.ndarray, name: str, what: str = "") -> np.ndarray:
    """bool [n]: whether each text is in the list file `name`; with `what` 'domain' or 'page' also whether it is below an entry."""
    values = pa.array([_tidy(entry, what) for entry in entries(name)], pa.large_string())
    texts = compute.utf8_lower(_arrow(column))
    found = _numpy(compute.is_in(texts, value_set=values))
    shorter = {"domain": r"^[^.]*\.?", "page": r"/?[^/]*$"}.get(what)
    for _ in range(_MOST_LEVELS if shorter else 0):
        texts = compute.replace_substring_regex(texts, shorter, "")
        if what == "page":  # a host alone is for lists of domains
            texts = compute.if_else(compute.match_substring(texts, "/"), texts, "")
        if not compute.any(compute.greater(compute.binary_length(texts), 0)).as_py():
            break
        found = found | _numpy(compute.is_in(texts, value_set=values))
    return found


def _tidy(entry: str, what: str) -> str:
    """An entry as the texts that it is compared with."""
    if what == "domain":
        return entry.removeprefix("*.").strip(".")
    if what == "page":
        return (
            entry.partition("://")[2].removeprefix("www.").rstrip("/")
            if "://" in entry
            else entry.removeprefix("www.").rstrip("/")
        )
    return entry
