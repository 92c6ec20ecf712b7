"""The kernels against the same model read by plain Python, on real and on random text."""

from __future__ import annotations

import math
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.text.batch import Texts
from hone.text.langid import kernels
from hone.text.langid.alphabet import MARK, OTHER, SCRIPT_SHIFT, SCRIPTS, alphabet
from hone.text.langid.identify import Identifier
from hone.text.langid.model import DEVIATIONS, LEAST_LETTERS, LEAST_SCORE, STANDARD_GRAMS, Model

MODEL = Model.load()
IDENTIFIER = Identifier()
MASK = (1 << 64) - 1
TEXTS = [
    "The weather was fine, so they walked along the river until it grew dark.",
    "Bí ó ti jẹ́ pé ṣíṣe àkíyèsí iyì tó jẹ́ àbímọ́ fún ẹ̀dá",
    "यह एक वाक्य है। Hindi and English mixed.",
    "Погода была хорошая, и они гуляли (along the river) до темноты.",
    "日本語のとても長い文章です。漢字とカタカナ",
    "מזג האוויר היה נאה",
    "Ünïcödé İstanbul ŞIRNAK straße",
    "a-b c_d e'f g1h 22 é",
    "한국어 문장입니다 짧은 글",
]


def entry(character: str) -> tuple[int, int]:
    """(script, lower case) from the tables of Unicode, apart from the module's."""
    if unicodedata.category(character)[0] not in "LM":
        return 0, 0
    number = int(alphabet()[ord(character)]) if ord(character) < 1 << 17 else 0
    return number >> SCRIPT_SHIFT, ord(character.lower()[0]) if number else 0


def runs(text: str) -> tuple[list[tuple[int, str]], dict[int, int], int, int]:
    """(runs of (script, letters), bytes per script, letters, visible characters)."""
    found: list[tuple[int, str]] = []
    votes: dict[int, int] = {}
    letters = visible = 0
    last = 0
    for character in text:
        script, lower = entry(character)
        if not script:
            visible += ord(character) > 32
            last = 0
            continue
        letters += 1
        visible += 1
        if script == MARK:
            if not last:
                continue
            script = last
        else:
            votes[script] = votes.get(script, 0) + len(character.encode())
        if script == last:
            found[-1] = (script, found[-1][1] + chr(lower))
        else:
            found.append((script, chr(lower)))
        last = script
    return found, votes, letters, visible


def bucket(gram: str) -> int:
    """The hash of an n-gram, its last character first; a space is 1."""
    values = [1 if character == " " else ord(character) + 1 for character in reversed(gram)]
    x = values[0] * 0x9E3779B97F4A7C15 & MASK
    for value in values[1:]:
        x = ((x ^ x >> 29) + value & MASK) * 0xBF58476D1CE4E5B9 & MASK
    return x >> 64 - kernels.BUCKET_BITS


def grams(text: str, script: int) -> list[int]:
    """Buckets of the letters of `script`, every other run a space."""
    words = [letters for number, letters in runs(text)[0] if number == script]
    if not words:
        return []
    stream = " " + " ".join(words) + " "
    found = []
    for end in range(1, len(stream)):
        if SCRIPTS[script] == "han" and stream[end] != " ":
            found.append(bucket(stream[end]))
        found += [bucket(stream[end + 1 - size : end + 1]) for size in kernels.SIZES[1:] if end + 1 >= size]
    return found


def answer(text: str, code: str) -> tuple[str, float]:
    """The language and its probability; of languages that tie for the best, `code` if it is among them."""
    _, votes, letters, visible = runs(text)
    script = min(votes, key=lambda number: (-votes[number], number), default=0)
    mine = [found for found in MODEL.scripts if found.name == SCRIPTS[script % (OTHER + 1)]]
    if not mine or letters < LEAST_LETTERS * visible or 2 * votes[script] < sum(votes.values()):
        return "unknown", 0.0
    buckets = grams(text, script)
    sums = mine[0].rows[buckets].astype(np.int64).sum(0) / kernels.STEPS
    lanes = mine[0].lanes
    best = int(sums[:lanes].argmax())
    if code in mine[0].languages and sums[mine[0].languages.index(code)] == sums[best]:
        best = mine[0].languages.index(code)  # a tie, as of one letter
    if best >= len(mine[0].languages):  # a rejector
        return "unknown", 0.0
    slack = DEVIATIONS * mine[0].fit_deviation[best] * max(1, math.sqrt(STANDARD_GRAMS / len(buckets)))
    if (sums[best] - sums[lanes]) / len(buckets) < mine[0].fit_mean[best] - slack:
        return "unknown", 0.0
    score = 1 / np.exp((sums[:lanes] - sums[best]) / (MODEL.temperature * len(buckets) ** MODEL.exponent)).sum()
    return (mine[0].languages[best], float(score)) if score >= LEAST_SCORE else ("unknown", 0.0)


def check(text: str) -> None:
    code, score = IDENTIFIER.identify(text)
    expected, probability = answer(unicodedata.normalize("NFC", text), code)  # the model counted composed letters
    assert code == expected and score == pytest.approx(probability, rel=1e-9)


@pytest.mark.parametrize("text", TEXTS)
def test_real_texts_answer_as_plain_python(text):
    check(text)


@given(st.text(alphabet=sorted(set("".join(TEXTS))), max_size=80))
def test_mixed_letters_answer_as_plain_python(text):
    check(text)


@given(st.text(max_size=40))
def test_any_text_answers_as_plain_python(text):
    check(text.encode("utf8", "replace").decode())


def test_languages_that_tie_have_one_probability():
    check("À")


def test_many_rows_do_not_overflow_the_words():
    """A word of eight lanes sums at most 256 rows at a time: 4,000 letters give 12,000 n-grams."""
    for letter in "et":
        check((letter * 7 + " ") * 500)


def test_counts_are_those_of_the_n_grams():
    texts = TEXTS * 3
    counts = kernels.count(*kernels.frozen(Texts.of(texts)), alphabet())
    expected = np.zeros_like(counts)
    for text in texts:
        votes = runs(text)[1]
        script = min(votes, key=lambda number: (-votes[number], number))
        np.add.at(expected[script], grams(text, script), 1)
    assert np.array_equal(counts, expected)


def test_letters_and_their_scripts():
    table = alphabet()
    for character, script, lower in [
        ("A", "latin", "a"),
        ("Ж", "cyrillic", "ж"),
        ("カ", "han", "カ"),
        ("ሰ", "other", "ሰ"),
    ]:
        assert SCRIPTS[table[ord(character)] >> SCRIPT_SHIFT] == script
        assert table[ord(character)] & (1 << SCRIPT_SHIFT) - 1 == ord(lower)
    assert not any(table[ord(character)] for character in " 0-_'.ª・")
    assert table[0x301] >> SCRIPT_SHIFT == MARK
