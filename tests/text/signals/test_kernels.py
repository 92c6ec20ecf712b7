"""Kernels at their edges: white space across blocks of 64 bytes, the ends of buffers, clocks that run out."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numba import njit

from hone.data.signals import signals_of
from hone.text import segment
from hone.text.batch import Texts
from hone.text.segment import BLOCK
from hone.text.signals import repeats, scan
from hone.text.signals import words as counted
from hone.text.signals.counts import WORD_COUNTS
from hone.text.tables import spaces
from tests.text.signals import oracle

# Only kernels call these; outside of kernels they are plain Python, so they are compiled here.
diversity, empty_table, ngrams = njit(repeats.diversity), njit(repeats.empty_table), njit(repeats.ngrams)
find_words, next_within = njit(segment.find_words), njit(segment.next_within)
word_key, empty_scratch = njit(segment.word_key), njit(scan.empty_scratch)
SPACES = [chr(code) for code in range(0x110000) if chr(code).isspace()]


def edges_of(text: str, room: int) -> list[str]:
    """The words that `find_words` finds when it is called again and again with room for `room` edges."""
    raw = text.encode()
    data, words = np.frombuffer(raw, np.uint8), []
    edges, state = np.zeros(room, np.int64), np.array([0, 1, 0, 0])
    while state[0] < len(raw):
        found = find_words(data, len(raw), spaces(), edges, np.zeros(BLOCK + 8, np.uint8), state)
        words += [raw[edges[at] : edges[at + 1]].decode() for at in range(0, found - 1, 2)]
        edges[0] = edges[found - 1]
    return words


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
def test_a_space_parts_words_wherever_it_stands(space):
    for at in range(2 * BLOCK + 3):
        for tail in ("", "b", "é" * 40, space * 3 + "c" * 70):
            text = "a" * at + space + tail
            assert edges_of(text, 2 * BLOCK) == text.split(), (space, at, tail)


def test_what_is_nearly_a_wide_space_parts_nothing():
    near = "".join(chr(code) for code in range(0x80, 0x3100) if not chr(code).isspace())
    assert edges_of(near, 2 * BLOCK) == [near]


def test_words_are_found_whatever_the_room():
    rng = random.Random(0)
    pieces = [*SPACES, " ", " ", "a", "bc", "漢", "é", "x" * 70, "’", "\u2003", "\u200b"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(300)))
        assert edges_of(text, rng.choice([BLOCK + 2, 100, 513])) == text.split()


def test_a_word_has_one_key_wherever_it_lies():
    rng = random.Random(0)
    for size in range(1, 60):
        word = bytes(rng.randrange(33, 256) for _ in range(size))
        alone = word_key(np.frombuffer(word, np.uint8), 0, size)
        inside = word_key(np.frombuffer(b"ab" + word + b"z" * 40, np.uint8), 2, 2 + size)
        assert alone == inside != word_key(np.frombuffer(word + b"z" * 40, np.uint8), 0, size + 1)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_the_next_byte_of_a_kind(size):
    for at in (*range(size), None):
        raw = bytearray(b"~" * size + b"5" * 70)
        if at is not None:
            raw[at] = ord("7")
        data = np.frombuffer(bytes(raw), np.uint8)
        assert next_within(data, 0, size, ord("0"), ord("9")) == (size if at is None else at)
        assert next_within(data[:size], 0, size, ord("7"), ord("7")) == (size if at is None else at)


@pytest.mark.slow
def test_clocks_begin_anew_before_they_run_out():
    words = random.Random(1).choices("abcdefgh", k=300)
    ids = np.array([ord(word) for word in words], np.int32)
    places = 4 * np.arange(301)
    table, out = empty_table(1000), np.zeros(9, np.int64)
    expected = [oracle.top_chars(words, n) for n in (2, 3, 4)] + [oracle.repeated_chars(words, n) for n in range(5, 11)]
    for clock in (1, 2**31 - 700, 2**31 - 301, 2**31 - 300, 2**31 - 5):
        table.clock[0] = clock
        for _ in range(2):
            ngrams(ids, places, 300, table, out)
            assert out.tolist() == expected
    last = np.zeros(200, np.int32)
    for clock in (1, 301, 2**31 - 301):
        different, mtld = diversity(ids, 300, last, clock, table.chosen, table.grams)
        assert different == 8 and mtld == pytest.approx(oracle.mtld(words), rel=1e-12)


def test_room_for_one_document_holds_every_word_of_it():
    for text in ("a", "a b", "a " * 2000, "é " * 700, "\n" * 999 + "x"):
        raw = text.encode()
        assert len(empty_scratch(len(raw)).ids) >= len(text.split())
        assert signals_of(Texts.of([text]))["words"][0] == len(text.split())


def test_keys_of_short_words_differ():
    words = {f"{number:x}".encode() for number in range(200_000)}
    keys = {int(word_key(np.frombuffer(word, np.uint8), 0, len(word))) for word in words}
    assert len(keys) == len(words)


def test_a_words_counts_are_named_in_the_order_of_their_places():
    """Kernels index them by the constants of one file, columns are made by the names of another."""
    assert [getattr(counted, name.upper()) for name in WORD_COUNTS] == list(range(counted.NUM_COUNTS))
