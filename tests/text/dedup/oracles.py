"""Plain Python twins of the deduplication kernels, and corpora to run them on."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from hone.data.corpus import Corpus

WORD = re.compile(r"\w+")
MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finish."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


UNSPACED = (
    "THAI ", "LAO ", "MYANMAR ", "KHMER ", "NEW TAI LUE ", "TAI LE ", "TAI THAM ", "TAI VIET ", "BALINESE ", "JAVANESE ", "YI ",
    "BOPOMOFO ", "HIRAGANA ", "KATAKANA", "HALFWIDTH KATAKANA", "HENTAIGANA ", "TANGUT ", "NUSHU ", "KHITAN SMALL ", "CJK UNIFIED ",
    "CJK COMPATIBILITY IDEOGRAPH-", "IDEOGRAPHIC ITERATION", "IDEOGRAPHIC CLOSING", "IDEOGRAPHIC NUMBER", "HANGZHOU ",
    "HANGUL SYLLABLE ", "VERTICAL KANA", "VERTICAL IDEOGRAPHIC", "MASU MARK", "OLD CHINESE ",
)  # fmt: skip
AFTER = ("NEW TAI LUE VOWEL", "NEW TAI LUE LETTER FINAL", "NEW TAI LUE TONE")
STACKS = "\u1039\u17d2\u1a60\u1b44\ua9c0"
TAILS = "ะาำๅະາຳຽ\uaab1\uaaba\uaabd\uff9e\uff9f"
LEADS = "เแโใไເແໂໃໄ\u19b5\u19b6\u19b7\u19ba\uaab5\uaab6\uaab9\uaabb\uaabc"


@functools.cache
def kind(char: str) -> str:
    """The part that a character has in words, from its Unicode name and category."""
    category = unicodedata.category(char)
    if category.startswith("M") or char == "\u200d":
        return "stack" if char in STACKS else "mark"
    if not WORD.match(char):
        return ""
    if char in LEADS:
        return "lead"
    if char in TAILS or unicodedata.name(char, "").startswith(AFTER):
        return "tail"
    tangut = 0x17000 <= ord(char) < 0x18D80  # without a name in Python, Khitan after it with one
    unspaced = category != "Nd" and (tangut or unicodedata.name(char, "").startswith(UNSPACED))
    return "alone" if unspaced else "letter"


CLUSTERS = ("alone", "lead", "tail")
"""Kinds with which a word of a script without spaces begins."""


def goes_on(before: str, now: str, cluster: bool) -> bool:
    """Whether a character of kind `now` belongs to the word whose last is of kind `before`; `cluster`: one without spaces."""
    if now in ("mark", "stack"):
        return True
    if now == "letter":
        return not cluster
    return cluster and (now == "tail" or (now == "alone" and before in ("lead", "stack")))


@functools.cache
def small(char: str) -> str:
    """A letter in lower case by itself; another character as it is."""
    return char.lower()[0].replace("ς", "σ") if WORD.match(char) else char


def words(text: str) -> list[str]:
    """The words of `text`, each letter in lower case by itself; clusters in scripts without spaces."""
    if text.isascii():  # without marks and clusters
        return WORD.findall(text.lower())
    found: list[str] = []
    before = ""  # the kind of the character before, in a word
    for char in text:
        now = kind(char) if ord(char) < 0x34000 else ""
        inside = bool(before) and goes_on(before, now, kind(found[-1][0]) in CLUSTERS)
        if not now or (now in ("mark", "stack") and not inside):
            before = ""
            continue
        found[-1:] = [found[-1] + small(char)] if inside else [*found[-1:], small(char)]
        before = now
    return found


def parts(run: str) -> list[str]:
    """The words of a run of characters without white space, with the punctuation at them."""
    found = [""]
    before, filled, cluster = "", False, False
    for char in run:
        now = kind(char) if ord(char) < 0x34000 else ""
        if now:
            inside = cluster and before and goes_on(before, now, True)
            if filled and (cluster or now in CLUSTERS) and not inside:
                found.append("")
                cluster = False
            cluster |= now in CLUSTERS
            filled = True
        cluster |= char in "\u0f0b\u0f0c"
        found[-1] += char
        before = now
    return found


def shingle_hashes(text: str, n: int) -> list[int]:
    """The hash of each run of n words; of all words when there are fewer."""
    hashes = []
    for word in words(text):
        value = 0xCBF29CE484222325
        for letter in word:
            value = (value ^ ord(letter)) * 0x100000001B3 & MASK
        hashes.append(mix(value))
    n = min(n, len(hashes))
    runs = [hashes[first : first + n] for first in range(len(hashes) - n + 1)] if hashes else []
    powers = [pow(0x9E3779B97F4A7C15, n - 1 - place, 1 << 64) for place in range(n)]
    return [mix(sum(power * value for power, value in zip(powers, run)) & MASK) for run in runs]


def signature(text: str, n: int, bands: int, rows: int, seed: int) -> list[int]:
    """The MinHash signature."""
    random = np.random.RandomState(seed)
    factors = [2 * int(value) + 1 for value in random.randint(0, 1 << 31, bands * rows, np.uint32)]
    shifts = [int(value) for value in random.randint(0, 1 << 32, bands * rows, np.uint32)]
    values = [value >> 32 for value in shingle_hashes(text, n)]
    return [
        min(((factor * value + shift) % (1 << 32) for value in values), default=(1 << 32) - 1)
        for factor, shift in zip(factors, shifts)
    ]


def fingerprint(text: str, n: int) -> int:
    """The SimHash fingerprint."""
    values = shingle_hashes(text, n)
    return sum(1 << bit for bit in range(64) if 2 * sum(value >> bit & 1 for value in values) > len(values))


def components(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """The least member of each node's connected component, by walking."""
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for one, other in edges:
        neighbours[one].add(other)
        neighbours[other].add(one)
    least = [-1] * count
    for start in range(count):
        waiting = [start] if least[start] < 0 else []
        while waiting:
            node = waiting.pop()
            if least[node] < 0:
                least[node] = start
                waiting += neighbours[node]
    return least


def shingles(text: str, n: int = 5) -> set[tuple[str, ...]]:
    """The set of runs of n words."""
    found = WORD.findall(text.lower())
    n = max(min(n, len(found)), 1)
    return set(zip(*(found[offset:] for offset in range(n))))


def jaccard(one: set, other: set) -> float:
    """Size of the intersection over size of the union."""
    return len(one & other) / max(len(one | other), 1)


def identity(text: str, place: int) -> str:
    """An id that has nothing to do with the order of documents."""
    return hashlib.blake2b(f"{place}:{text}".encode(), digest_size=8).hexdigest()


def corpus_of(folder: Path, texts: Sequence[str], ids: Sequence[str], num_shards: int = 1, rows: int = 50) -> Corpus:
    """A corpus of `texts` in shards of about equal length; only the columns that deduplication reads."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number in range(num_shards):
        here = slice(number * len(texts) // num_shards, (number + 1) * len(texts) // num_shards)
        hashes = [
            int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts[here]
        ]
        columns = {
            "id": pa.array(list(ids[here]), pa.string()),
            "text": pa.array(list(texts[here]), pa.large_string()),
            "text_hash": pa.array(hashes, pa.uint64()),
        }
        shards.append(folder / f"{number:05d}.parquet")
        parquet.write_table(pa.table(columns), shards[-1], row_group_size=rows)
    return Corpus(shards)


def removed(technique, folder: Path, texts: Sequence[str], ids: Sequence[str], num_shards: int = 1) -> dict[str, str]:
    """{id of a removed document: id of the one that stands for it}."""
    corpus = corpus_of(folder / "shards", texts, ids, num_shards)
    state = folder / "state"
    state.mkdir()
    stands = technique.compare(corpus, np.ones(len(texts), bool), state).stands
    return {ids[index]: ids[other] for index, other in enumerate(stands.tolist()) if index != other}
