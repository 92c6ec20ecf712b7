"""Signals equal the plainest possible count, and stay linear on hostile text."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data import FILTERS
from hone.data.corpus import schema
from hone.data.expression import columns_of
from hone.data.signals import SIGNALS, normalize, signals

few_words = st.lists(st.sampled_from(["a", "bb", "the", "#x", "3", "..."]), max_size=60)


def top_chars(words: list[str], n: int) -> int:
    grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    if not grams or max(grams.values()) == 1:
        return 0
    return max(len(gram) * count for gram, count in grams.items() if count == max(grams.values()))


def repeated_chars(words: list[str], n: int) -> int:
    seen: set[tuple[str, ...]] = set()
    covered = [False] * len(words)
    for i in range(len(words) - n + 1):
        gram = tuple(words[i : i + n])
        if gram in seen:
            covered[i : i + n] = [True] * n
        seen.add(gram)
    spaces = sum(a and b for a, b in itertools.pairwise(covered))
    return sum(len(word) for word, hit in zip(words, covered) if hit) + spaces


@settings(max_examples=200, deadline=None)
@given(few_words)
def test_ngram_signals_equal_the_definition(words):
    text = " ".join(words)
    row = signals(text)
    for n in (2, 3, 4):
        assert row[f"top_{n}gram_chars"] == pytest.approx(top_chars(words, n) / max(len(text), 1))
    for n in range(5, 11):
        assert row[f"dup_{n}gram_chars"] == pytest.approx(repeated_chars(words, n) / max(len(text), 1))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_every_signal_is_there_for_any_text(text):
    row = signals(normalize(text.replace("\0", "")))
    assert set(row) == set(SIGNALS)
    assert all(0 <= row[name] <= 1 for name in ("dup_lines", "alpha_words", "bullet_lines", "punctuated_lines"))


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab \t\r\n\u0301e", max_size=40))
def test_normalize_is_idempotent(text):
    assert normalize(normalize(text)) == normalize(text)


def test_counts_by_hand():
    text = "The cat sat. It is #1...\n- a bullet\n- a bullet\n\nSee https://x.org or lorem ipsum {"
    row = signals(text)
    assert row["words"] == 18 and row["lines"] == 4 and row["stop_words"] == 1
    assert row["bullet_lines"] == 0.5 and row["dup_lines"] == 0.25 and row["ellipsis_lines"] == 0.25
    assert row["hash_ratio"] == pytest.approx(1 / 18) and row["alpha_words"] == pytest.approx(14 / 18)
    assert row["urls"] == row["lorem_ipsum"] == row["braces"] == 1 and row["sentences"] == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", [".", " ", "a", "1", "\n", "a ", "#", "…", "http://", "\u0301", "漢", ".)"])
def test_hostile_runs_take_linear_time(unit):
    row = signals(normalize("x" + unit * (1_000_000 // len(unit)) + "x"))
    assert row["bytes"] > 0


def test_filters_use_columns_that_exist():
    there = set(schema().names)
    for name in FILTERS:
        technique = FILTERS.read(name)
        for rule in technique.rules():
            assert columns_of(rule.keep) <= there, (name, rule)
        assert columns_of(technique.when) <= there
