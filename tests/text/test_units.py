"""Words of all scripts: the table against Unicode's names, the kernel against plain Python, and words by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from hone.text import units
from hone.text.hashing import BASIS, PRIME, word_table
from hone.text.units import ALONE, LEAD, MARK, POINT, STACK, TAIL, unit_table, words_of
from tests.text.dedup import oracles

KINDS = {"letter": 0, "mark": MARK, "stack": STACK, "tail": TAIL, "alone": ALONE, "lead": LEAD}
next_word = njit(units.next_word)
is_joined = njit(units.is_joined)


def spans(text: str) -> list[tuple[int, int, int]]:
    """(begin, end, hash) of every word."""
    data, table, place, found = np.frombuffer(text.encode(), np.uint8), unit_table(), 0, []
    while place < len(data):
        begin, end, place, hashed = next_word(data, place, len(data), table)
        if begin < len(data):
            found.append((begin, end, hashed))
    return found


def test_the_table_agrees_with_unicode():
    table, plain = unit_table(), word_table()
    for point in range(len(table)):
        if not 0xD800 <= point < 0xE000:
            kind = oracles.kind(chr(point))
            assert (int(table[point]) > 0) == (kind != ""), hex(point)
            assert int(table[point]) & ~int(POINT) == int(KINDS.get(kind, 0)), (hex(point), kind)
            assert int(table[point] & POINT) in (int(plain[point]), point if kind else 0), hex(point)


def test_line_breaking_classes_agree():
    regex = pytest.importorskip("regex")
    table = unit_table()
    for point in range(0x300, len(table)):
        char = chr(point)
        if (
            regex.match(r"[\p{Line_Break=SA}&&\p{Alphabetic}&&[^\p{M}]]", char, regex.V1)
            and not 0x11700 <= point < 0x11750
        ):
            assert table[point] >= TAIL, (
                f"{point:x} is of a script without spaces"
            )  # but Ahom, which has its own digits
        if table[point] >= ALONE and regex.match(r"\p{Script=Latin}|\p{Script=Cyrillic}|\p{Script=Arabic}", char):
            raise AssertionError(f"{point:x} is of a script with spaces")
        assert bool(table[point] >= LEAD) == bool(regex.match(r"\p{Logical_Order_Exception}", char)), hex(point)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The café’s naïve co-op, e.g. 3.14", "The café s naïve co op e g 3 14"),
        ("Ọ̀gbẹ́ni e\u0301te\u0301", "Ọ̀gbẹ́ni e\u0301te\u0301"),
        ("हिन्दी में लिखा है।", "हिन्दी में लिखा है"),
        ("الْعَرَبِيَّة لغة", "الْعَرَبِيَّة لغة"),
        ("한국어 문장입니다.", "한 국 어 문 장 입 니 다"),
        ("今天天气很好。GPU也好", "今 天 天 气 很 好 GPU 也 好"),
        ("ラーメンを食べた", "ラ ー メ ン を 食 べ た"),
        ("เธอไปโรงเรียนน้ำ", "เธ อ ไป โร ง เรี ย น น้ำ"),
        ("ປະເທດລາວ", "ປະ ເທ ດ ລາ ວ"),
        ("ភាសាខ្មែរស្រី", "ភា សា ខ្មែ រ ស្រី"),
        ("မြန်မာဘာသာ ဗုဒ္ဓ", "မြ န် မာ ဘာ သာ ဗု ဒ္ဓ"),
        ("བོད་སྐད་ཡིག", "བོད སྐད ཡིག"),
        ("ꦧꦱꦗꦮ ꦏ꧀ꦏ", "ꦧ ꦱ ꦗ ꦮ ꦏ꧀ꦏ"),
        ("๒๕๖๗ปี ១២៣ឆ្នាំ", "๒๕๖๗ ปี ១២៣ ឆ្នាំ"),
        ("", ""),
        ("?! \u0301", ""),
    ],
)
def test_words_by_hand(text, expected):
    assert words_of(text) == expected.split()


@settings(max_examples=150)
@given(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
    | st.text("aB_ .é\u0301漢かー한ไเกาะิ់្កေ္က\u1039က\u200dअि१๑", max_size=20)
)
def test_words_are_those_of_plain_python(text):
    found = []
    for word in oracles.words(text):
        value = int(BASIS)
        for letter in word:
            value = (value ^ ord(letter)) * int(PRIME) % (1 << 64)
        found.append(value)
    assert [hashed for *_, hashed in spans(text)] == found


@settings(max_examples=150)
@given(st.text("aB_ .é漢かー한ไเกาะิ់្កេ္ကअि१๑", max_size=20))
def test_neighbours_are_joined_within_words_only(text):
    """After a mark, which may belong to a word of either sort, a vowel is always joined: no cut separates them."""
    table, place = unit_table(), 0
    begun = {begin for begin, _, _ in spans(text)}
    inside = {at for begin, end, _ in spans(text) for at in range(begin + 1, end)}
    for one, other in itertools.pairwise(text):
        place += len(one.encode())
        values = [table[ord(char)] for char in (one, other)]
        if not (MARK <= values[0] < TAIL or MARK <= values[1] < TAIL):
            assert is_joined(*values) == (place in inside), (one, other)
        elif place in inside:
            assert is_joined(*values), (one, other)
    assert begun or not inside
