"""The benchmark corpus: real English, code and other languages, grown by recombination, with near-duplicates of known Jaccard.

    from benchmarks.data.corpus import corpus, grown
    texts = corpus(data, 60)          # list of about 60 MB of texts
    made = grown(data, 60)            # the same texts, with their ground truth

Real documents fill up to 40 % of each kind; the rest are splices of 4 to 12 consecutive words (code: 3 to 10 lines) of
real text, so that words, lines and statistics are natural and two documents share almost nothing by chance.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

_WORD = re.compile(r"\w+")
_SHARES = {"english": 0.6, "code": 0.2, "other": 0.2}
_REAL_SHARE = 0.4
_COPIES = 0.09
_EXACT = 0.18


class Grown(NamedTuple):
    """A corpus with its ground truth."""

    texts: list[str]
    kinds: list[str]  # "english", "code" or a language's code, per text
    real: np.ndarray  # bool [n]: an original text, not spliced
    pairs: list[tuple[int, int, float]]  # (text, its altered copy, exact Jaccard similarity of their word 5-grams)


def corpus(folder: Path, megabytes: float, seed: int = 0) -> list[str]:
    """About `megabytes` of texts made from the data in `folder`; the same for the same seed."""
    return grown(folder, megabytes, seed).texts


def grown(folder: Path, megabytes: float, seed: int = 0) -> Grown:
    """As `corpus`, with kinds and the injected near-duplicates."""
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    rows: list[tuple[str, str, bool]] = []
    for kind, sources in (("english", english(folder)), ("code", code(folder)), ("other", other(folder))):
        budget = int(megabytes * 1e6 * _SHARES[kind] * (1 - _COPIES))
        rows += _fill(kind, sources, budget, draw, numbers)
    draw.shuffle(rows)
    sources = [index for index, (text, _, _) in enumerate(rows) if len(text) > 400]
    copies: list[tuple[int, str]] = []
    for index in draw.choices(sources, k=int(_COPIES * len(rows))):
        copies.append((index, altered(rows[index][0], draw)))
    where = list(range(len(rows) + len(copies)))
    draw.shuffle(where)  # text or copy number i becomes document where[i]
    texts, kinds, real = [""] * len(where), [""] * len(where), np.zeros(len(where), bool)
    for place, (text, kind, whole) in zip(where, rows):
        texts[place], kinds[place], real[place] = text, kind, whole
    pairs = []
    for place, (index, text) in zip(where[len(rows) :], copies):
        texts[place], kinds[place] = text, rows[index][1]
        pairs.append((where[index], place, jaccard(shingles(rows[index][0]), shingles(text))))
    return Grown(texts, kinds, real, pairs)


def shingles(text: str, n: int = 5) -> set[tuple[str, ...]]:
    """The set of word n-grams of `text`, lower-cased; all its words when it has fewer."""
    words = _WORD.findall(text.lower())
    n = max(min(n, len(words)), 1)
    return set(zip(*(words[offset:] for offset in range(n))))


def jaccard(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """Size of the intersection over size of the union; 0 for two empty sets."""
    return len(one & other) / max(len(one | other), 1)


def altered(text: str, draw: random.Random) -> str:
    """A near-duplicate of `text`: identical (18 %) or with a similarity in .45 to .98, more often near than far.

    Half of them have words replaced, dropped or swapped all over; the others lose an end or gain foreign text at one.
    """
    if draw.random() < _EXACT:
        return text
    goal = draw.uniform(0.45, 0.98)
    if draw.random() < 0.3:
        goal = max(goal, draw.uniform(0.45, 0.98))
    parts = re.split(r"(\s+)", text)  # words at even places
    words = len(parts) // 2 + 1
    if draw.random() < 0.5:
        kept = (2 * goal / (1 + goal)) ** (1 / 5)  # of the 5-grams, kept^5 survive on both sides
        for _ in range(max(round((1 - kept) * words), 1)):
            place = 2 * draw.randrange(words)
            action = draw.random()
            if action < 0.6:
                parts[place] = parts[2 * draw.randrange(words)] + draw.choice("abcdefgh")
            elif action < 0.8:
                parts[place] = ""
            else:
                neighbour = min(place + 2, 2 * (words - 1))
                parts[place], parts[neighbour] = parts[neighbour], parts[place]
        return "".join(parts)
    if draw.random() < 0.5:
        lost = 2 * int((1 - goal) * words)
        return "".join(parts[lost:] if draw.random() < 0.5 else parts[: len(parts) - lost])
    extra = int((1 / goal - 1) * words)
    foreign = " ".join(parts[2 * draw.randrange(words)][::-1] for _ in range(extra))
    return f"{foreign}\n{text}" if draw.random() < 0.5 else f"{text}\n{foreign}"


def english(folder: Path) -> list[tuple[str, str]]:
    """(kind, document) of the English texts: books in runs of paragraphs, stories, reviews, speeches, encyclopedia, news."""
    texts: list[str] = []
    for book in sorted(folder.glob("books/en-*.txt.gz")):
        texts += _runs(_book(book), 3000)
    for name in ("quality/movie_reviews.zip", "lm_text/inaugural.zip", "lm_text/state_union.zip"):
        with zipfile.ZipFile(folder / name) as pack:
            for member in sorted(pack.namelist()):
                if member.endswith(".txt") and not Path(member).name.startswith("README"):
                    texts.append(pack.read(member).decode("utf8", "replace"))
    stories = gzip.decompress((folder / "lm_text/tinystories-4M-lowercase.txt.gz").read_bytes()).decode(
        "utf8", "replace"
    )
    texts += re.split(r"\n(?=once upon a time|one day, )", stories)
    texts += re.split(r"\n(?= = [^=])", (folder / "lm_text/wikitext2-raw-valid.txt").read_text(encoding="utf8"))
    rows = (folder / "neardup/articles_100.train").read_text(encoding="utf8").splitlines()
    texts += [row.split(" ", 1)[1] for row in rows]
    return [("english", text.strip()) for text in texts if len(text) > 200]


def code(folder: Path) -> list[tuple[str, str]]:
    """(kind, document) of the source files."""
    with gzip.open(folder / "code/permissive-code.jsonl.gz", "rt", encoding="utf8") as lines:
        return [("code", json.loads(line)["text"]) for line in lines]


def other(folder: Path) -> list[tuple[str, str]]:
    """(language, document) in 76 languages: runs of 12 sentences, and two books."""
    sentences: dict[str, list[str]] = defaultdict(list)
    with gzip.open(folder / "langid/lingua-sentences-75x1000.jsonl.gz", "rt", encoding="utf8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["lang"] != "en":
                sentences[row["lang"]].append(row["text"])
    texts = [
        (language, "\n".join(rows[first : first + 12]))
        for language, rows in sorted(sentences.items())
        for first in range(0, len(rows), 12)
    ]
    texts += [("de", text) for text in _runs(_book(folder / "books/de-die-verwandlung.txt.gz"), 3000)]
    texts += [("es", text) for text in _runs(_book(folder / "books/es-don-quijote.txt.gz"), 3000)]
    return texts


def _book(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes())
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    text = text.replace("\r\n", "\n")
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*", text, re.DOTALL)
    end = re.search(r"\*\*\* ?END OF", text)
    return text[start.end() if start else 0 : end.start() if end else None]


def _runs(text: str, size: int) -> list[str]:
    """Consecutive paragraphs, gathered to about `size` characters."""
    runs, waiting, length = [], [], 0
    for part in re.split(r"\n{2,}", text):
        waiting.append(part)
        length += len(part)
        if length >= size:
            runs.append("\n\n".join(waiting))
            waiting, length = [], 0
    return [*runs, "\n\n".join(waiting)]


def _fill(
    kind: str, sources: list[tuple[str, str]], budget: int, draw: random.Random, numbers: np.random.Generator
) -> Iterator[tuple[str, str, bool]]:
    """(text, kind, real) of about `budget` bytes: real ones first, then spliced ones of log-normal length."""
    draw.shuffle(sources)
    used = 0
    for language, text in sources:
        if used >= _REAL_SHARE * budget:
            break
        used += len(text.encode())
        yield text, language, True
    pools: dict[str, list[bytes]] = defaultdict(list)
    for language, text in sources:
        pools[language].append(text.encode())
    makers: dict[str, Callable[[int], str]] = {}
    names = sorted(pools)
    weights = [sum(map(len, pools[name])) for name in names]
    while used < budget:
        name = draw.choices(names, weights)[0]
        if name not in makers:
            makers[name] = _splicer(pools[name], kind == "code", numbers)
        text = makers[name](int(min(numbers.lognormal(np.log(2000), 1.0), 200_000)))
        used += len(text.encode())
        yield text, name, False


def _splicer(pool: list[bytes], lines: bool, numbers: np.random.Generator) -> Callable[[int], str]:
    """A function (bytes) -> a text of about that size from runs of words, or of lines, of the `pool`."""
    joined = b"\n".join(pool)
    data = np.frombuffer(joined, np.uint8)
    gap = data == 10 if lines else (data == 32) | (data == 10) | (data == 9) | (data == 13)
    starts = np.flatnonzero(gap[:-1] & ~gap[1:]) + 1
    low, high = (3, 10) if lines else (4, 12)
    mean = len(joined) / max(len(starts), 1) * (low + high) / 2

    def make(size: int) -> str:
        count = max(int(size / mean), 1)
        lengths = numbers.integers(low, high + 1, count)
        begin = numbers.integers(0, len(starts) - high, count)
        pieces = [joined[one:two] for one, two in zip(starts[begin].tolist(), starts[begin + lengths].tolist())]
        return b"".join(pieces).decode().strip()

    return make
