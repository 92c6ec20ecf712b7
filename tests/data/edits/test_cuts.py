"""Cuts against plain Python: joined ones do what one after the other does."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hone.data.edits.cuts import Cuts, apply_cuts, cut_whole, figures, join
from hone.text.batch import Texts

SPANS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 12)), max_size=12)


def made(spans, sizes, base=7) -> Cuts:
    rows = [(doc + base, start, min(start + size, sizes[doc])) for doc, start, size in spans]
    return Cuts.of(*(np.array(part, np.int64) for part in zip(*rows))) if rows else Cuts.none()


def plain(texts: list[bytes], cuts: Cuts, base=7) -> list[bytes]:
    """The texts without the cut bytes, one byte at a time."""
    gone = {(d, at) for d, s, e in zip(*(part.tolist() for part in cuts[:3])) for at in range(s, e)}
    return [
        bytes(byte for at, byte in enumerate(text) if (number + base, at) not in gone)
        for number, text in enumerate(texts)
    ]


def random_texts(seed: int) -> list[bytes]:
    draw = np.random.default_rng(seed)
    return [draw.integers(97, 123, draw.integers(0, 30)).astype(np.uint8).tobytes() for _ in range(5)]


@given(SPANS)
def test_spans_become_sorted_and_apart(spans):
    sizes = [40] * 5
    cuts = made(spans, sizes)
    assert {(d, at) for d, s, e in zip(*(part.tolist() for part in cuts[:3])) for at in range(s, e)} == {
        (doc + 7, at) for doc, start, size in spans for at in range(start, min(start + size, 40))
    }
    rows = list(zip(*(part.tolist() for part in cuts[:3])))
    assert all(start < end for _, start, end in rows)
    assert all(one[0] < two[0] or one[2] < two[1] for one, two in itertools.pairwise(rows))


@given(st.integers(0, 100), SPANS, SPANS)
def test_joined_cuts_do_what_one_after_the_other_does(seed, first, second):
    texts = random_texts(seed)
    earlier = made(first, [len(text) for text in texts])
    between = plain(texts, earlier)
    later = made(second, [len(text) for text in between])
    both = join(earlier, later)
    assert plain(texts, both) == plain(between, later)
    documents = np.arange(7, 12)
    applied = apply_cuts(Texts.of([text.decode() for text in texts]), documents, both)
    assert [text.encode() for text in applied.strings()] == plain(between, later)
    some = documents[::2]
    applied = apply_cuts(Texts.of([texts[number - 7].decode() for number in some]), some, both)
    assert [text.encode() for text in applied.strings()] == plain(between, later)[::2]


def test_without_cuts_nothing_is_copied():
    texts = Texts.of(["one", "two"])
    assert apply_cuts(texts, np.array([3, 4]), Cuts.none()) is texts
    other = Cuts.of(np.array([5]), np.array([0]), np.array([2]))
    assert apply_cuts(texts, np.array([3, 4]), other) is texts
    assert apply_cuts(Texts.of([]), np.empty(0, np.int64), other).num_texts == 0


def test_what_is_left_too_short_goes_whole():
    cuts = Cuts.of(np.array([1, 1, 2]), np.array([0, 50, 10]), np.array([20, 90, 20]))
    whole = cut_whole(cuts, np.array([0, 1, 2]), np.array([5, 100, 100]), 50)
    assert [part.tolist() for part in whole[:3]] == [[1, 2], [0, 10], [100, 20]]
    assert figures([whole, cuts]) == {"cuts": 5, "cut_bytes": 110 + 70, "cut_documents": 4}


FILLED = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 9), st.sampled_from([b"", b"<A>", b"<LONGER>"])),
    max_size=9,
)


def apart(spans, texts: list[bytes], base=7) -> Cuts:
    """Cuts of those spans that do not touch an earlier one, with their fills."""
    taken, rows = set(), []
    for doc, start, size, fill in spans:
        end = min(start + size, len(texts[doc]))
        here = {(doc, at) for at in range(start - 1, end + 1)}
        if start < end and not here & taken:
            taken |= here
            rows.append((doc + base, start, end, fill))
    if not rows:
        return Cuts.none()
    return Cuts.of(*(np.array(part, np.int64) for part in list(zip(*rows))[:3]), np.array([row[3] for row in rows]))


def filled(texts: list[bytes], cuts: Cuts, base=7) -> list[bytes]:
    left = list(texts)
    for doc, start, end, fill in reversed(list(zip(*(part.tolist() for part in cuts)))):
        left[doc - base] = left[doc - base][:start] + fill + left[doc - base][end:]
    return left


@given(st.integers(0, 100), FILLED, FILLED)
def test_fills_are_written_and_later_spans_cover_them_as_a_whole(seed, first, second):
    texts = random_texts(seed)
    earlier = apart(first, texts)
    between = filled(texts, earlier)
    documents = np.arange(7, 12)
    applied = apply_cuts(Texts.of([text.decode() for text in texts]), documents, earlier)
    assert [text.encode() for text in applied.strings()] == between
    marks = {(doc, at) for doc, text in enumerate(between) for at, byte in enumerate(text) if byte in b"<AGLNOER>"}
    whole = [row for row in second if not any((row[0], at) in marks for at in range(row[1] - 1, row[1] + row[2] + 1))]
    later = apart(whole, between)  # none of these touches a fill
    assert filled(texts, join(earlier, later)) == filled(between, later)


def test_a_later_span_over_a_part_of_a_fill_covers_all_of_it():
    texts = [b"write to ann@example.com today"]
    earlier = Cuts.of(np.array([7]), np.array([9]), np.array([24]), np.array([b"<EMAIL>"]))
    assert filled(texts, earlier) == [b"write to <EMAIL> today"]
    later = Cuts.of(np.array([7]), np.array([12]), np.array([18]))
    assert filled(texts, join(earlier, later)) == [b"write to oday"]
