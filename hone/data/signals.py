"""Signals: one look at a document gives the columns that every rule decides by (Gopher, C4, FineWeb and simple counts)."""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from collections import Counter

import numpy as np

from hone.data.text.batch import Texts

Lexicon = tuple[str, ...]

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
SIGNALS: dict[str, str] = {
    "text_hash": "uint64",
    "bytes": "int64",
    "chars": "int64",
    "words": "int64",
    "lines": "int64",
    "sentences": "int64",
    "mean_word_chars": "float64",
    "max_word_chars": "int64",
    "max_line_chars": "int64",
    "hash_ratio": "float64",
    "ellipsis_ratio": "float64",
    "bullet_lines": "float64",
    "ellipsis_lines": "float64",
    "alpha_words": "float64",
    "stop_words": "int64",
    "punctuated_lines": "float64",
    "short_lines": "float64",
    "newline_ratio": "float64",
    "javascript_lines": "float64",
    "policy_lines": "float64",
    "lorem_ipsum": "int64",
    "braces": "int64",
    "urls": "int64",
    "digit_ratio": "float64",
    "upper_ratio": "float64",
    "unique_words": "float64",
    "compression_ratio": "float64",
    "dup_lines": "float64",
    "dup_line_chars": "float64",
    "dup_paragraphs": "float64",
    "dup_paragraph_chars": "float64",
    **{f"top_{n}gram_chars": "float64" for n in (2, 3, 4)},
    **{f"dup_{n}gram_chars": "float64" for n in range(5, 11)},
}
"""Column name to type. Ratios are per word, fractions are of lines or characters; 0 where the document has none."""

_LETTER = re.compile(r"[^\W\d_]")
_BULLET = ("•", "-", "●", "*", "‣", "◦")
# Possessive and anchored at run starts: linear even on ten megabytes of dots.
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]”’]*+(?=\s|$)|[。！？]")
_TERMINAL = (".", "!", "?", '"', "'", "”", "。", "！", "？")
_PARAGRAPH = re.compile(r"\n{2,}")
_URL = re.compile(r"https?://|www\.")
_DIGIT = re.compile(r"[0-9]+")
_UPPER = re.compile(r"[A-Z]+")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_EDGE_PUNCTUATION = ".,;:!?\"'()[]{}<>*`"


def normalize(text: str) -> str:
    """Text as hone keeps it: NFC, line ends as '\\n', no trailing space at line ends, nothing around it."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "\n".join([line.rstrip(" \t") for line in text.split("\n")]).strip("\n").rstrip()


def signals_of(texts: Texts, lexicon: Lexicon | None = None) -> dict[str, np.ndarray]:
    """Every column of SIGNALS for each of `texts`, as an array [num_texts] of the type that SIGNALS names.

    `lexicon` names the words and phrases that `toxic_words` counts; without one that column is not a number.
    """
    rows = [signals(text) for text in texts.strings()]
    return {name: np.array([row[name] for row in rows], kind) for name, kind in SIGNALS.items()}


def signals(text: str) -> dict[str, float | int]:
    """The value of every column in SIGNALS for one document."""
    raw = text.encode()
    words = text.split()
    lowered = text.lower()
    lines = [line for line in text.split("\n") if line.strip()]
    paragraphs = [part for part in _PARAGRAPH.split(text) if part.strip()]
    num_words, num_lines, num_chars = max(len(words), 1), max(len(lines), 1), max(len(text), 1)
    word_chars = np.fromiter(map(len, words), np.int64, len(words))
    bare = {word.strip(_EDGE_PUNCTUATION) for word in set(lowered.split())}
    alphabetic = sum(count for word, count in Counter(words).items() if _LETTER.search(word))
    row: dict[str, float | int] = {
        "text_hash": int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little"),
        "bytes": len(raw),
        "chars": len(text),
        "words": len(words),
        "lines": len(lines),
        "sentences": len(_SENTENCE_END.findall(text)),
        "mean_word_chars": float(word_chars.sum() / num_words),
        "max_word_chars": int(word_chars.max(initial=0)),
        "max_line_chars": max(map(len, lines), default=0),
        "hash_ratio": text.count("#") / num_words,
        "ellipsis_ratio": (text.count("...") + text.count("…")) / num_words,
        "bullet_lines": sum(line.lstrip().startswith(_BULLET) for line in lines) / num_lines,
        "ellipsis_lines": sum(line.endswith(("...", "…")) for line in lines) / num_lines,
        "alpha_words": alphabetic / num_words,
        "stop_words": len(STOP_WORDS & bare),
        "punctuated_lines": sum(line.endswith(_TERMINAL) for line in lines) / num_lines,
        "short_lines": sum(len(line) <= 30 for line in lines) / num_lines,
        "newline_ratio": text.count("\n") / num_words,
        "javascript_lines": _lines_with(lowered, ("javascript",)) / num_lines,
        "policy_lines": _lines_with(lowered, POLICY_PHRASES) / num_lines,
        "lorem_ipsum": lowered.count("lorem ipsum"),
        "braces": text.count("{"),
        "urls": len(_URL.findall(lowered)),
        "digit_ratio": sum(map(len, _DIGIT.findall(text))) / num_chars,
        "upper_ratio": sum(map(len, _UPPER.findall(text))) / num_chars,
        "unique_words": len(bare) / num_words,
        "compression_ratio": len(raw) / max(len(zlib.compress(raw, 1)), 1),
    }
    row["dup_lines"], row["dup_line_chars"] = _duplicates(lines, num_chars)
    row["dup_paragraphs"], row["dup_paragraph_chars"] = _duplicates(paragraphs, num_chars)
    row.update(_ngram_signals(words, word_chars, num_chars))
    return row


def _lines_with(lowered: str, phrases: tuple[str, ...]) -> int:
    """Number of lines that hold one of `phrases`; most texts hold none and are not split."""
    if not any(phrase in lowered for phrase in phrases):
        return 0
    return sum(any(phrase in line for phrase in phrases) for line in lowered.split("\n"))


def _duplicates(parts: list[str], num_chars: int) -> tuple[float, float]:
    """(fraction of parts seen before, fraction of characters in them)."""
    seen: set[str] = set()
    count = chars = 0
    for part in parts:
        if part in seen:
            count += 1
            chars += len(part)
        seen.add(part)
    return count / max(len(parts), 1), chars / num_chars


def _ngram_signals(words: list[str], word_chars: np.ndarray, num_chars: int) -> dict[str, float]:
    """Character fractions of the most frequent 2- to 4-gram and of 5- to 10-grams seen before.

    An n-gram's characters include the spaces inside it. Words in several repeated n-grams count once.
    """
    numbers: dict[str, int] = {}
    ids = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.uint64, len(words))
    ends = np.concatenate([[0], np.cumsum(word_chars)])
    row = {}
    grams = ids
    for n in range(2, 11):
        # Polynomial hash of the n words that begin at each place; 64 bits, so equal hashes are equal n-grams.
        grams = mix(grams[:-1] * _MIX + ids[n - 1 :] + np.uint64(1)) if len(words) >= n else grams[:0]
        name = f"top_{n}gram_chars" if n <= 4 else f"dup_{n}gram_chars"
        _, first, inverse, counts = np.unique(grams, return_index=True, return_inverse=True, return_counts=True)
        if not len(grams) or counts.max() == 1:
            row[name] = 0.0
            if n > 4:  # no longer n-gram can repeat either
                row.update({f"dup_{m}gram_chars": 0.0 for m in range(n, 11)})
                break
            continue
        if n <= 4:
            top = first[counts == counts.max()]
            chars = int((ends[top + n] - ends[top]).max()) + n - 1
            row[name] = chars * int(counts.max()) / num_chars
        else:
            repeated = np.flatnonzero(first[inverse] != np.arange(len(grams)))
            row[name] = _covered_chars(repeated, n, word_chars) / num_chars
    return row


def _covered_chars(starts: np.ndarray, n: int, word_chars: np.ndarray) -> int:
    """Characters in the union of the n-word spans at `starts` (int [k], rising), inner spaces included."""
    change = np.zeros(len(word_chars) + 1, np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + n, -1)
    covered = np.cumsum(change[:-1]) > 0
    joined = covered[1:] & covered[:-1]
    return int(word_chars[covered].sum() + joined.sum())


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads every input bit (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
