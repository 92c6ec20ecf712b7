"""Substring deduplication against a suffix array and against a plain set of windows."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.edits.cuts import Cuts, figures
from hone.data.edits.substrings import Substrings
from hone.text.batch import Texts
from hone.text.edits.spans import at_borders
from hone.text.units import unit_table
from tests.data.edits.memory import Memory
from tests.data.edits.test_lines import english


def by_windows(texts: list[bytes], order: list[int], length: int) -> dict[int, set[int]]:
    """Text number to the bytes of it in a window that stands earlier, `order` being the order of the texts."""
    first: dict[bytes, tuple[int, int]] = {}
    gone: dict[int, set[int]] = {index: set() for index in order}
    for index in order:
        for at in range(len(texts[index]) - length + 1):
            one, place = first.setdefault(texts[index][at : at + length], (index, at))
            if one != index or at >= place + length:
                gone[index] |= set(range(at, at + length))
    return gone


def suffix_array(values: np.ndarray) -> np.ndarray:
    """The order of all suffixes of `values` (int64 [n]) by prefix doubling."""
    _, rank = np.unique(values, return_inverse=True)
    step = 1
    while True:
        after = np.concatenate([rank[step:] + 1, np.zeros(min(step, len(rank)), np.int64)])
        key = rank * (len(rank) + 1) + after
        order = np.argsort(key, kind="stable")
        fresh = np.concatenate([[0], np.cumsum(np.diff(key[order]) != 0)])
        rank = np.empty(len(rank), np.int64)
        rank[order] = fresh
        if fresh[-1] == len(rank) - 1:
            return order
        step *= 2


def by_suffix_array(texts: list[bytes], length: int) -> dict[int, set[int]]:
    """As `by_windows` for texts in their order, but earlier copies may overlap: what the paper's program finds."""
    joined, starts = [], []
    for number, text in enumerate(texts):
        starts.append(len(joined))
        joined += [*text, 256 + number]
    values = np.array(joined)
    order = suffix_array(values)
    cells = np.concatenate([values, np.full(length, -1)])
    gone = np.zeros(len(values), bool)
    group: list[int] = []
    for rank in range(len(order) + 1):
        here = int(order[rank]) if rank < len(order) else -1
        alike = here >= 0 and group and np.array_equal(cells[here : here + length], cells[group[0] : group[0] + length])
        if not alike:
            for at in set(group) - {min(group, default=-1)}:
                gone[at : at + length] = True
            group = []
        group.append(here)
    return {
        number: set(np.flatnonzero(gone[start : start + len(text)]).tolist())
        for number, (start, text) in enumerate(zip(starts, texts))
    }


def marked(spec: Substrings, corpus: Memory, state, kept=None, **options) -> dict[int, set[int]]:
    """The repeats as found, before they are brought to borders."""
    spec.cuts(corpus, np.ones(len(corpus), bool) if kept is None else kept, state, **options)
    from hone.data.edits.rows import spans_of

    gone: dict[int, set[int]] = {index: set() for index in range(len(corpus))}
    for number, _, first, _ in corpus.spans():
        for document, start, end in zip(*(part.tolist() for part in spans_of(sorted(state.glob("gone-*")), number))):
            gone[first + document] |= set(range(start, end))
    return gone


PIECES = [
    b"abcabcabc" * 3,
    b"a" * 25,
    b"The cat sat on the mat, ",
    b"and so on and so forth",
    "日本語の文章".encode(),
    b"x",
    b"\n",
]


@pytest.mark.slow
@settings(max_examples=80)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=9).map(b"".join), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
    st.integers(20, 45),
)
def test_exactly_the_repeats_of_plain_python(tmp_path_factory, texts, draw, length):
    ids = [f"{number:04x}" for number in draw.sample(range(1000), len(texts))]
    kept = np.array([draw.random() < 0.9 for _ in texts])
    border = draw.randint(0, len(texts))
    corpus = Memory([text.decode() for text in texts], ids, (border, 0, len(texts) - border), batch=draw.randint(1, 3))
    order = sorted(np.flatnonzero(kept).tolist(), key=lambda index: ids[index])
    found = marked(Substrings(min_bytes=length), corpus, tmp_path_factory.mktemp("state"), kept)
    assert {index: found[index] for index in order} == by_windows(texts, order, length)
    assert not any(found[index] for index in range(len(texts)) if index not in order)


def test_a_suffix_array_finds_no_more_in_real_text(shared_data, tmp_path):
    texts = [text[:4000] for text in english(shared_data)][:60]
    corpus = Memory(texts)
    found = marked(Substrings(), corpus, tmp_path)
    oracle = by_suffix_array([text.encode() for text in texts], 100)
    ours, theirs = (sum(map(len, part.values())) for part in (found, oracle))
    assert all(found[index] <= oracle[index] for index in oracle)
    assert theirs > 5000 and ours >= 0.98 * theirs
    # Of what is found, what is left standing is the broken words at both ends.
    cuts = Substrings(min_left_bytes=0).cuts(corpus, np.ones(len(texts), bool), tmp_path / "..")
    assert figures(cuts)["cut_bytes"] > 0.9 * ours


def test_any_shards_and_order_give_the_same_text(shared_data, tmp_path):
    texts = english(shared_data)
    spec = Substrings()
    ids = [f"{number:016x}" for number in random.Random(3).sample(range(10**9), len(texts))]
    kept = np.ones(len(texts), bool)
    corpus = Memory(texts, ids)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    left = corpus.after(spec.cuts(corpus, kept, folders[0]))
    size = sum(map(len, texts))
    assert sum(map(len, left)) < 0.95 * size
    order = random.Random(4).sample(range(len(texts)), len(texts))
    other = Memory([texts[i] for i in order], [ids[i] for i in order], (10, 0, 7, len(texts) - 17), batch=5)
    assert other.after(spec.cuts(other, kept, folders[1], gathered_rows=500)) == [left[i] for i in order]
    # Killed anywhere: whatever files are there by then, the rest comes out the same.
    names = sorted(path.name for path in folders[1].iterdir())
    for number, name in enumerate(names):
        if name.startswith(("runs-0", "windows", "cuts")) and number % 2:
            (folders[1] / name).unlink()
    assert other.after(spec.cuts(other, kept, folders[1], gathered_rows=500)) == [left[i] for i in order]
    # What is left repeats no more than words at the borders.
    again = Memory([text for text in left if text])
    more = spec.cuts(again, np.ones(len(again), bool), folders[2])
    assert figures(more)["cut_bytes"] < 0.01 * size


def joins(left: str, right: str) -> bool:
    """Whether two characters side by side are inside one word, by Unicode categories."""
    word = lambda char: (char.isalnum() or char == "_") and not re.match("[\u0e00-\u0eff\u3040-\u9fff]", char)  # noqa: E731
    mark = lambda char: unicodedata.category(char).startswith("M") or char == "\u200d"  # noqa: E731
    return mark(right) or left == "\u200d" or (word(right) and (word(left) or mark(left)))


CHARS = st.sampled_from("ab 1_.,\n-éßж한글中文のท้าी हि\u0301\u200d👍’“")


@settings(max_examples=300)
@given(st.text(CHARS, min_size=1, max_size=30), st.data())
def test_cuts_lie_between_words(text, data):
    raw = text.encode()
    start = data.draw(st.integers(0, len(raw) - 1))
    end = data.draw(st.integers(start + 1, len(raw)))
    spans = (np.array([4]), np.array([start]), np.array([end]))
    document, starts, ends = at_borders(*Texts.of([text]), np.array([4]), *spans, unit_table())
    assert len(document) <= 1
    for low, high in zip(starts.tolist(), ends.tolist()):
        left, gone, right = raw[:low].decode(), raw[low:high].decode(), raw[high:].decode()
        assert high <= end and (low >= start or raw[low:start].isspace())
        assert gone and not (right and joins(gone[-1], right[0]))
        assert gone[0].isspace() or not (left and joins(left[-1], gone[0]))
        assert not (left and right and joins(left[-1], right[0]))
        assert 2 * (high - low) >= end - start
        if right[:1] in ("", "\n"):
            assert not left.endswith((" ", "\t"))


def test_words_lines_and_scripts_stay_whole(tmp_path):
    notice = "All rights reserved; no part of this may be reproduced in any form without the written permission of us"
    chinese = "版权所有未经书面许可不得以任何形式转载或复制本网站的任何内容违者必究并将依法追究其法律责任"
    texts = [
        f"A page of its own that says much about the cat. {notice} again. {'It goes on for a while. ' * 2}",
        f"Something else is said in here about dogs and men.X{notice}Y and more follows here. {'Dogs bark at men. ' * 3}",
        f"第一篇文章讲的是猫的生活习惯和饮食{chinese}这里是结尾部分的内容没有重复",
        f"另一篇文章则说起了狗和人之间的故事{chinese}末尾又是别的话题与前面完全不同",
    ]
    corpus = Memory(texts)
    left = corpus.after(Substrings(min_left_bytes=10).cuts(corpus, np.ones(4, bool), tmp_path))
    assert left[0] == texts[0] and left[2] == texts[2]
    assert (
        left[1].startswith("Something else is said in here about dogs and men.XAll")
        and "usY and more follows" in left[1]
    )
    assert "reproduced" not in left[1] and chinese not in left[3] and len(left[3]) == len(texts[3]) - len(chinese)


@pytest.mark.parametrize("texts", [[], [""], ["short"], ["a" * 99, "a" * 99], ["a" * 199]])
def test_nothing_to_find(tmp_path, texts):
    corpus = Memory(texts)
    cuts = Substrings().cuts(corpus, np.ones(len(texts), bool), tmp_path)
    assert figures(cuts)["cuts"] == 0 and len(cuts) == 1


def test_one_long_text_that_defeats_sampling(tmp_path):
    text = "ab" * 50_000
    corpus = Memory([text, "ab" * 100])
    cuts = Substrings().cuts(corpus, np.ones(2, bool), tmp_path)
    assert cuts[0].document.tolist() == [1] and isinstance(
        cuts[0], Cuts
    )  # the first is one word; of the second nothing is left
