"""The kernel's features and vectors are those of plain Python, and its regression finds what scikit-learn finds."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.text import features
from hone.text.batch import Texts
from hone.text.hashing import word_table

MASK = (1 << 64) - 1
BASIS, PRIME, ROLL = 0xCBF29CE484222325, 0x00000100000001B3, 0x9E3779B97F4A7C15
TEXTS = st.text(max_size=40) | st.text(alphabet="aAbB _-.\n1éÉßΣς日本カ語한😀𠀀'", max_size=40)


def mix(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


def letters_of(text: str) -> list[int]:
    """0 where a code point ends a word, else its lower case, by the table that all kernels share."""
    table = word_table()
    return [int(table[ord(char)]) if ord(char) < len(table) else ord(char) for char in text]


def words_of(letters: list[int]) -> list[int]:
    words, word = [], []
    for letter in [*letters, 0]:
        alone = 0x2E80 <= letter < 0xA000 or letter >= 0x20000
        if word and (letter == 0 or alone):
            words.append(word)
            word = []
        if alone:
            words.append([letter])
        elif letter:
            word.append(letter)
    hashes = []
    for word in words:
        value = BASIS
        for letter in word:
            value = ((value ^ letter) * PRIME) & MASK
        hashes.append(mix(value))
    return hashes


def counted(text: str, word_runs: int, letter_run: int, log_buckets: int) -> Counter[int]:
    """Counts per bucket, by hand."""
    letters = letters_of(text)
    words = words_of(letters)
    hashes = list(words)
    if word_runs > 1:
        hashes += [mix((one * ROLL + two + 0xA5A3564A00000000) & MASK) for one, two in itertools.pairwise(words)]
    if word_runs > 2:
        triples = zip(words, words[1:], words[2:])
        hashes += [mix(((one * ROLL + two) * ROLL + three + 0xC2B2AE3D27D4EB4F) & MASK) for one, two, three in triples]
    if letter_run:
        spaced = re.sub(r"\0+", " ", "".join(map(chr, [0, *letters, 0])))[1:]
        for first in range(len(spaced) - letter_run + 1):
            value = 0
            for letter in spaced[first : first + letter_run]:
                value = (value * ROLL + ord(letter)) & MASK
            hashes.append(mix(value ^ 0xD6E8FEB86659FD93))
    return Counter(value >> (64 - log_buckets) for value in hashes)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([0, 1, 3, 5]))
def test_counts_are_those_of_plain_python(texts, word_runs, letter_run):
    log_buckets = 12
    seen = np.zeros(1 << log_buckets, np.int64)
    weights = np.linspace(-1, 1, 1 << log_buckets).astype(np.float32)
    idf = (1 + np.arange(1 << log_buckets) % 7 / 7).astype(np.float32)
    expected = []
    for text in texts:
        counts = counted(text, word_runs, letter_run, log_buckets)
        seen[list(counts)] += 1
        vector = {bucket: (1 + math.log(count)) * float(idf[bucket]) for bucket, count in counts.items()}
        norm = math.sqrt(sum(value * value for value in vector.values()))
        expected.append(0.25 + sum(value * float(weights[bucket]) for bucket, value in vector.items()) / (norm or 1))
    batch, runs = Texts.of(texts), (word_table(), word_runs, letter_run, log_buckets)
    assert (features.frequencies(*batch, *runs) == seen).all()
    assert features.margins(*batch, *runs, weights, idf, 0.25) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_text_of_many_repeats():
    text = "again " * 5000
    counts = counted(text, 1, 0, 12)
    weights, idf = np.ones(1 << 12, np.float32), np.ones(1 << 12, np.float32)
    assert list(counts.values()) == [5000]
    found = features.margins(*Texts.of([text, ""]), word_table(), 1, 0, 12, weights, idf, 0.5)
    assert found == pytest.approx([1.5, 0.5])
    assert features._gain(5000) == pytest.approx(1 + math.log(5000))
    assert features._gain(3) == pytest.approx(1 + math.log(3))


def test_an_epoch_is_adagrad():
    """Against the same steps in plain Python, in float64."""
    texts = ["good fine good", "bad awful", "good bad", "fine words"]
    targets, shares = np.array([1.0, 0.0, 1.0, 0.0]), np.array([1.0, 2.0, 1.0, 0.5])
    order = np.array([2, 0, 3, 1, 0])
    idf = 1 + np.arange(1 << 10) % 5 / 5
    weights, squares = np.zeros((2, (1 << 10) + 1))
    loss = features.epoch(
        *Texts.of(texts), word_table(), 2, 0, 10, idf, targets, shares, order, 0.2, 0.01, weights, squares
    )
    mine, sums, losses = Counter(), Counter(), []
    for place in order:
        counts = counted(texts[place], 2, 0, 10)
        vector = {bucket: (1 + math.log(count)) * idf[bucket] for bucket, count in counts.items()}
        norm = math.sqrt(sum(value * value for value in vector.values()))
        margin = mine["bias"] + sum(value / norm * mine[bucket] for bucket, value in vector.items())
        chance = 1 / (1 + math.exp(-margin))
        losses.append(-shares[place] * math.log(chance if targets[place] else 1 - chance))
        slope = shares[place] * (chance - targets[place])
        steps = {bucket: slope * value / norm + 0.01 * mine[bucket] for bucket, value in vector.items()}
        for bucket, step in {**steps, "bias": slope}.items():
            sums[bucket] += step * step
            mine[bucket] -= 0.2 * step / (math.sqrt(sums[bucket]) + 1e-12)
    bias = mine.pop("bias")
    assert weights[-1] == pytest.approx(bias) and loss == pytest.approx(np.mean(losses))
    assert {bucket: weights[bucket] for bucket in mine} == pytest.approx(dict(mine))
    assert np.count_nonzero(weights[:-1]) == len(mine)
