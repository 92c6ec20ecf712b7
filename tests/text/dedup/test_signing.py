"""Hashes, signatures and fingerprints equal their plain Python twins bit for bit."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.dedup.minhash import MinHash
from hone.data.dedup.simhash import SimHash
from hone.text.batch import Texts
from hone.text.dedup.signing import CHUNK, band_keys
from hone.text.hashing import word_table
from tests.text.dedup import oracles

CASES = [
    "",
    " ",
    "?!",
    "one",
    "One two",
    "a b c d e",
    "The quick  brown\tfox_jumps over\n42 lazy dogs",
    "Straße İstanbul ΟΔΟΣ οδος ОДНАЖДЫ naïve Ǆ ᾈ ﬁ",
    "二〇二六年，人工智能。ประเทศไทย हिन्दी 한국어",
    "𝒜𝓃 astral 𐐀𐐨 word 🦊 between",
    "a" * 10_000,
    "x " * 10_000,
    "it's 3.14 e-mail foo_bar __init__",
]


def texts_with_offsets(texts: list[str]) -> Texts:
    """As a view of a larger buffer, as Arrow gives it."""
    made = Texts.of(["xx ends in a word", *texts, "word after it"])
    return Texts(made.data, made.offsets[1:-1])


def test_signatures_equal_the_plain_ones():
    technique = MinHash(bands=3, rows=4, seed=7)
    made, worded = technique.signatures(texts_with_offsets(CASES))
    assert made.dtype == np.uint32
    assert made.tolist() == [oracles.signature(text, 5, 3, 4, 7) for text in CASES]
    assert worded.tolist() == [bool(oracles.words(text)) for text in CASES]


def test_fingerprints_equal_the_plain_ones():
    made, worded = SimHash().keys(texts_with_offsets(CASES))
    assert made[0].tolist() == [oracles.fingerprint(text, 3) for text in CASES]
    assert worded.tolist() == [bool(oracles.words(text)) for text in CASES]


@settings(max_examples=80)
@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",))) | st.text("aB_ .\n"), max_size=5),
    st.integers(1, 7),
)
def test_any_text_at_any_length_of_run(texts, n):
    batch = texts_with_offsets(texts)
    made, _ = MinHash(shingle_words=n, bands=2, rows=3, seed=n).signatures(batch)
    assert made.tolist() == [oracles.signature(text, n, 2, 3, n) for text in texts]
    made, _ = SimHash(shingle_words=n).keys(batch)
    assert made[0].tolist() == [oracles.fingerprint(text, n) for text in texts]


@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 4, CHUNK + 4])
def test_texts_about_as_long_as_a_chunk(count):
    draw = random.Random(count)
    text = " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))
    made, _ = MinHash(bands=1, rows=3).signatures(Texts.of([text, text + " more"]))
    assert made.tolist() == [oracles.signature(one, 5, 1, 3, 1) for one in (text, text + " more")]


def test_the_table_knows_every_word_letter_of_python():
    table = word_table()
    for point in range(sys.maxunicode + 1):
        letter = chr(point)
        if 0xD800 <= point < 0xE000:
            continue
        expected = ord(letter.lower()[0].replace("ς", "σ")) if oracles.WORD.match(letter) else 0
        assert (int(table[point]) if point < len(table) else 0) == expected, hex(point)


def test_a_text_cut_inside_a_letter_reads_nothing_beyond():
    data = np.frombuffer("word é".encode(), np.uint8)
    for cut in (6, 7):
        MinHash(bands=1, rows=1).signatures(Texts(data[:cut], np.array([0, cut])))
    whole, _ = MinHash(bands=1, rows=1).signatures(Texts.of(["word"]))
    cut, _ = MinHash(bands=1, rows=1).signatures(Texts(data, np.array([0, 6])))
    assert (cut == whole).all()


def test_keys_are_equal_where_bands_are():
    draw = np.random.default_rng(0)
    signed = draw.integers(0, 2, (400, 6), np.uint32)
    keys = band_keys(signed, 2)
    for band in range(3):
        part = [tuple(row) for row in signed[:, 2 * band : 2 * band + 2].tolist()]
        assert len(set(part)) == len(set(keys[band].tolist())) == len(set(zip(part, keys[band].tolist())))
    assert not set(keys[0].tolist()) & set(keys[1].tolist()), "the same rows in another band are another key"


def test_one_text_of_ten_megabytes():
    draw = random.Random(0)
    block = " ".join(f"{draw.choice(('alpha', 'beta', 'gamma'))}{draw.randrange(10**5)}" for _ in range(3000)) + " "
    times = 10_000_000 // len(block) + 1
    made, _ = MinHash(bands=2, rows=3).signatures(Texts.of([block * times]))
    assert made[0].tolist() == oracles.signature(block * 2, 5, 2, 3, 1), "repeated shingles count once"
    found, _ = SimHash().keys(Texts.of([block * times]))
    near = oracles.fingerprint(block * 4, 3)
    assert (int(found[0, 0]) ^ near).bit_count() <= 2, "votes grow with the text"


def test_agreement_estimates_jaccard():
    draw = random.Random(0)
    words = [f"w{draw.randrange(500)}" for _ in range(600)]
    technique = MinHash(bands=64, rows=8)
    for changed in (5, 20, 60):
        other = list(words)
        for place in draw.sample(range(600), changed):
            other[place] = "new"
        one, two = " ".join(words), " ".join(other)
        made, _ = technique.signatures(Texts.of([one, two]))
        exact = oracles.jaccard(oracles.shingles(one), oracles.shingles(two))
        assert abs((made[0] == made[1]).mean() - exact) < 4 * (0.25 / 512) ** 0.5
