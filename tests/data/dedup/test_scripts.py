"""Near-duplicates in every script: signatures agree as often as the sets of words are similar, and copies are found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.data import peers_scripts
from benchmarks.data.scripts import copies, grouped, pairs_of
from hone.data.dedup.minhash import MinHash
from hone.data.dedup.simhash import SimHash
from hone.text.batch import Texts
from hone.text.units import words_of

LETTERS = {
    "Latin": "abcdefghijklmnoprstuvwzéäß", "Cyrillic": "абвгдежзиклмнопрстуфхцчшыья", "Greek": "αβγδεζηθικλμνξοπρστυφχψω",
    "Arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "Hebrew": "אבגדהוזחטיכלמנסעפצקרשת", "Devanagari": "अआइकखगघचछजटडतदनपबमयरलवशसहािीुूे",
}  # fmt: skip
CLUSTERS = {
    "Han": [chr(0x4E00 + 7 * number) for number in range(600)],
    "kana": [chr(point) for point in (*range(0x3042, 0x3090, 2), *range(0x30A2, 0x30F0, 2))],
    "Hangul": [chr(0xAC00 + 28 * number) for number in range(390)],
    "Thai": [lead + one + mark for lead in ("", "เ", "ไ") for one in "กขคงจชตทนบปพมยรลวสหอ" for mark in ("", "่", "ิ", "า")],
    "Lao": [lead + one + mark for lead in ("", "ເ", "ໄ") for one in "ກຂຄງຈສຊຕທນບປພມຍລວຫອ" for mark in ("", "່", "ິ", "າ")],
    "Khmer": [one + mark for one in "កខគងចឆជតទនបពមយរលវសហអ" for mark in ("", "ា", "ិ", "្រ", "្មែ")],
    "Burmese": [one + mark for one in "ကခဂငစဆဇတထနပဖဗမယရလဝသဟအ" for mark in ("", "ာ", "ိ", "်", "္က")],
}  # fmt: skip

EXPECTED = ["0x5c16f3c2c7544902", "0x734edbfc118c8709", "0x4739a8d457b55ca9"]
PRINTS = ["0xea43409c90d1bd43", "0x9158830153242c0", "0x6d2a53347523a444"]


def sentences(script: str) -> list[str]:
    """80 sentences of random words of a script."""
    draw = random.Random(script)
    if script in LETTERS:
        words = ["".join(draw.choices(LETTERS[script], k=draw.randint(2, 8))) for _ in range(900)]
        return [" ".join(draw.choices(words, k=12)) + "." for _ in range(80)]
    return ["".join(draw.choices(CLUSTERS[script], k=25)) for _ in range(80)]


@pytest.mark.parametrize("script", [*LETTERS, *CLUSTERS])
def test_signatures_estimate_the_similarity_of_words(script):
    """A value of the signature agrees with probability J; of 70 x 112 of them the share is within .02."""
    technique, draw = MinHash(), random.Random(0)
    for goal in (0.6, 0.85):
        pairs, exact = pairs_of(sentences(script), goal, 70, draw)
        signed, _ = technique.signatures(Texts.of([text for pair in pairs for text in pair]))
        assert abs((signed[::2] == signed[1::2]).mean() - exact.mean()) < 0.02
        assert abs(exact.mean() - goal) < 0.03, "the pairs are as similar as asked for"


@pytest.mark.parametrize("script", list(CLUSTERS))
def test_words_are_the_clusters(script):
    draw = random.Random(0)
    drawn = draw.choices(CLUSTERS[script], k=200)
    assert words_of("".join(drawn)) == drawn


def test_fifty_copies_of_a_chinese_text_are_one_group():
    text = "。".join(sentences("Han"))
    draw = random.Random(0)
    made = copies(text, 50, draw)
    assert all(sum(a != b for a, b in zip(text, copy)) >= 15 for copy in made)
    assert grouped(made, peers_scripts.hone) == 50
    assert grouped([text, *copies(text, 4, draw), *sentences("Han")[:3]], peers_scripts.hone) == 5


def test_fingerprints_of_copies_are_near_in_scripts_without_spaces():
    for script in CLUSTERS:
        text = " ".join(sentences(script))
        found, worded = SimHash().keys(
            Texts.of([text, copies(text, 1, random.Random(0))[0], " ".join(sentences("Latin"))])
        )
        assert worded.all()
        near, far = (int(found[0, 0] ^ found[0, other]).bit_count() for other in (1, 2))
        assert near <= 10 < far, script


def test_text_of_letters_signs_as_it_always_has():
    """The values are those of the version before scripts without spaces were segmented."""
    texts = [
        "The quick brown fox jumps over the lazy dog, naïve café 42 times.",
        "Съешь ещё этих мягких французских булок",
        "ΟΔΟΣ οδος Straße",
    ]
    keys, _ = MinHash().keys(Texts.of(texts))
    assert [hex(int(np.bitwise_xor.reduce(row))) for row in keys.T] == EXPECTED
    assert [hex(int(one)) for one in SimHash().keys(Texts.of(texts))[0][0]] == PRINTS
