"""Growth: a corpus of any size from real text, every document a pure function of the seed and its number.

    from benchmarks.data.growth import grow
    folder = grow(data, work, num_files=10)     # Parquet files of 100 MB of text

A document is drawn from the sentences (code: runs of lines) of real documents of one language, log-normal in length, so
that words and sentences are natural and two documents share almost nothing by chance. Stated shares of them are exact
copies of another one (10 %), copies with some words dropped or inserted (10 %), and of low quality (8 %): single sentences,
one sentence over and over, menus. Copies are made of documents of any earlier file. Fewer files are the first of more.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numba import njit

from benchmarks.data import corpus
from hone.text.batch import Texts

FILE_BYTES = 100_000_000
"""Bytes of text in a file."""
SHARES = {"english": 0.75, "code": 0.10, "other": 0.15}
EXACT, NEAR, POOR = 0.10, 0.10, 0.08
_GROUP_BYTES = 16 << 20
_NUMBERS = 1 << 20
"""Document numbers reserved for each file."""
_MEDIAN_BYTES, _SIGMA, _MOST_BYTES = 2000.0, 1.0, 200_000
_ENOUGH = 20_000
"""Least number of documents of a file."""
_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)]*\s+|\n{2,}")


class Pool(NamedTuple):
    """Real pieces end to end: piece i is data[starts[i]:starts[i + 1]]; group g has pieces borders[g] up to borders[g + 1].

    `reach` float [num_groups] are the groups' shares of the documents, added up; `lines` says which are joined by line.
    """

    data: np.ndarray
    starts: np.ndarray
    borders: np.ndarray
    reach: np.ndarray
    lines: np.ndarray


def grow(data: Path, work: Path, num_files: int, seed: int = 0) -> Path:
    """A folder in `work` with files 0 to `num_files` - 1, made unless they are there, and no others."""
    store = work / f"grown-{seed}-{_version()}"
    store.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(num_files) if not (store / _name(number)).exists()]
    if missing:
        pool = pooled(data)
        for number in missing:
            _write(store / _name(number), pool, seed, number)
    folder = work / f"{store.name}-first-{num_files}"
    folder.mkdir(exist_ok=True)
    for number in range(num_files):
        link = folder / _name(number)
        if not link.exists():
            link.symlink_to((store / _name(number)).resolve())
    return folder


def pooled(data: Path) -> Pool:
    """The pieces of the real documents that benchmarks/data/corpus.py reads."""
    groups: dict[str, list[bytes]] = defaultdict(list)
    shares: dict[str, float] = {}
    for kind, rows in (("english", corpus.english(data)), ("code", corpus.code(data)), ("other", corpus.other(data))):
        sizes: dict[str, int] = defaultdict(int)
        for language, text in rows:
            sizes[language] += len(text)
            groups[language] += _lines(text) if kind == "code" else _sentences(text)
        shares |= {language: SHARES[kind] * size / sum(sizes.values()) for language, size in sizes.items()}
    names = sorted(groups)
    pieces = [piece for name in names for piece in groups[name]]
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    borders = np.concatenate([[0], np.cumsum([len(groups[name]) for name in names])]).astype(np.int64)
    reach = np.cumsum([shares[name] for name in names])
    lines = np.array([name == "code" for name in names])
    return Pool(np.frombuffer(b"".join(pieces), np.uint8), starts, borders, reach / reach[-1], lines)


def documents(pool: Pool, seed: int, file: int, first: int, num_bytes: int) -> Texts:
    """Documents of file number `file` from its number `first` on, until they have `num_bytes` together."""
    return Texts(*_documents(*pool, np.uint64(seed), file, first, num_bytes))


def _write(path: Path, pool: Pool, seed: int, number: int) -> None:
    first = written = 0
    temporary = path.with_suffix(".tmp")
    schema = pa.schema([("text", pa.large_string()), ("url", pa.string())])
    with parquet.ParquetWriter(temporary, schema, compression="zstd", compression_level=1) as writer:
        while written < FILE_BYTES:
            texts = documents(pool, seed, number, first, min(_GROUP_BYTES, FILE_BYTES - written))
            urls = [f"https://www.example.org/{number}/{first + place}" for place in range(texts.num_texts)]
            writer.write_table(pa.table([texts.to_arrow(), pa.array(urls)], schema=schema))
            first += texts.num_texts
            written += texts.num_bytes
    assert _ENOUGH <= first < _NUMBERS, f"{first} documents in a file"
    temporary.replace(path)


def _name(number: int) -> str:
    return f"{number:05d}.parquet"


def _version() -> str:
    """Hash of this file: corpora made by other rules are not reused."""
    return hashlib.blake2b(Path(__file__).read_bytes(), digest_size=4).hexdigest()


def _sentences(text: str) -> list[bytes]:
    found = (" ".join(part.split()).encode() for part in _SENTENCE.split(text))
    return [part for part in found if 20 <= len(part) <= 1000]


def _lines(text: str) -> list[bytes]:
    lines = text.split("\n")
    runs = ("\n".join(lines[first : first + 6]).encode() for first in range(0, len(lines), 6))
    return [run for run in runs if 20 <= len(run) <= 1000]


@njit(cache=True, nogil=True, boundscheck=False)
def _mixed(value):
    """A 64-bit hash of a 64-bit number (splitmix64)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True, boundscheck=False)
def _uniform(state):
    """The next number in [0, 1) of the stream in `state` (uint64 [1])."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    return float(_mixed(state[0]) >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True, boundscheck=False)
def _begin(state, seed, file, number):
    state[0] = _mixed(_mixed(seed) ^ np.uint64(file * _NUMBERS + number))


@njit(cache=True, nogil=True, boundscheck=False)
def _role(state):
    """0: a document of its own, 1: an exact copy, 2: a near copy, 3: of low quality. The first draw of each document."""
    drawn = _uniform(state)
    return 1 if drawn < EXACT else 2 if drawn < EXACT + NEAR else 3 if drawn < EXACT + NEAR + POOR else 0


@njit(cache=True, nogil=True, boundscheck=False)
def _group(state, reach):
    return min(np.searchsorted(reach, _uniform(state), "right"), len(reach) - 1)


@njit(cache=True, nogil=True, boundscheck=False)
def _copy(data, begin, end, out, place):
    for byte in range(begin, end):
        out[place] = data[byte]
        place += 1
    return place


@njit(cache=True, nogil=True, boundscheck=False)
def _own(data, starts, borders, reach, lines, state, out, place):
    """Writes an original document at `place` of `out`; returns its end."""
    group = _group(state, reach)
    around = np.sqrt(-2 * np.log(1 - _uniform(state))) * np.cos(2 * np.pi * _uniform(state))
    goal = place + min(_MEDIAN_BYTES * np.exp(_SIGMA * around), _MOST_BYTES)
    num_pieces = borders[group + 1] - borders[group]
    fresh = True
    while fresh or place < goal:
        if not fresh:
            out[place] = 10 if lines[group] or _uniform(state) < 0.2 else 32
            place += 1
            if out[place - 1] == 10 and not lines[group]:
                out[place] = 10
                place += 1
        fresh = False
        piece = borders[group] + int(_uniform(state) * num_pieces)
        place = _copy(data, starts[piece], starts[piece + 1], out, place)
    return place


@njit(cache=True, nogil=True, boundscheck=False)
def _poor(data, starts, borders, reach, state, out, place):
    """Writes a document of low quality: a sentence, one over and over, or a menu of first words."""
    group = _group(state, reach)
    num_pieces = borders[group + 1] - borders[group]
    kind = int(_uniform(state) * 3)
    piece = borders[group] + int(_uniform(state) * num_pieces)
    for turn in range(1 if kind == 0 else 5 + int(_uniform(state) * 40)):
        if turn:
            out[place] = 10
            place += 1
        end = starts[piece + 1]
        if kind == 2:
            piece = borders[group] + int(_uniform(state) * num_pieces)
            end = starts[piece]
            while end < starts[piece + 1] and end < starts[piece] + 16 and data[end] != 32:
                end += 1
            while end < starts[piece + 1] and data[end] & 0xC0 == 0x80:  # not inside a character
                end += 1
        place = _copy(data, starts[piece], end, out, place)
    return place


@njit(cache=True, nogil=True, boundscheck=False)
def _edited(data, size, state, out, place):
    """Writes `data[:size]` at `place` of `out` with words dropped and letters inserted before words: Jaccard .5 to .98."""
    goal = 0.5 + 0.48 * _uniform(state)
    rate = 1 - (2 * goal / (1 + goal)) ** 0.2  # of its 5-grams so many stay: (1 - rate)^5
    byte = 0
    while byte < size:
        letter = data[byte]
        out[place] = letter
        place += 1
        byte += 1
        if letter == 32 and _uniform(state) < rate:
            if _uniform(state) < 0.5:
                while byte < size and data[byte] != 32 and data[byte] != 10:
                    byte += 1
            else:
                out[place] = 97 + int(_uniform(state) * 26)
                place += 1
    return place


@njit(cache=True, nogil=True, boundscheck=False)
def _documents(data, starts, borders, reach, lines, seed, file, first, num_bytes):
    """(uint8 [m], int64 [k + 1]): documents `first`, `first` + 1 ... of a file until they have `num_bytes`."""
    out = np.empty(num_bytes + 2 * _MOST_BYTES, np.uint8)
    whole = np.empty(2 * _MOST_BYTES, np.uint8)
    offsets = np.zeros(num_bytes // 10 + 2, np.int64)
    state, other = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    place = count = 0
    while place < num_bytes:
        number = first + count
        _begin(state, seed, file, number)
        role = _role(state)
        if number == 0 and file == 0:
            role = 0
        if role == 0:
            place = _own(data, starts, borders, reach, lines, state, out, place)
        elif role == 3:
            place = _poor(data, starts, borders, reach, state, out, place)
        else:
            found = False
            while not found:  # a document of its own to copy
                source = int(_uniform(state) * (file + 1))
                last = number if source == file else _ENOUGH
                which = int(_uniform(state) * last)
                if last == 0:
                    source, which, found = 0, 0, file == 0
                _begin(other, seed, source, which)
                found = _role(other) == 0 or found or (source == 0 and which == 0)
            if role == 1:
                place = _own(data, starts, borders, reach, lines, other, out, place)
            else:
                size = _own(data, starts, borders, reach, lines, other, whole, 0)
                place = _edited(whole, size, state, out, place)
        count += 1
        offsets[count] = place
    return out[:place], offsets[: count + 1]
