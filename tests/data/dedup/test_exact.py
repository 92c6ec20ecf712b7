"""Exact duplicates against a dictionary of texts."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.dedup.exact import Exact
from tests.data.dedup import oracles


class Columns:
    """A corpus that only has columns."""

    def __init__(self, hashes: list[int], ids: list[str]) -> None:
        self.columns = {"text_hash": np.array(hashes, np.uint64), "id": np.array(ids, str)}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.text("abc", max_size=2), st.booleans()), max_size=30), st.just(None))
def test_as_a_dictionary_would(rows, state):
    hashes, ids, alive = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    stands = Exact().representatives(Columns(hashes, ids), np.array(alive, bool), state)
    for index in range(len(rows)):
        group = [other for other in range(len(rows)) if alive[other] and hashes[other] == hashes[index]]
        assert stands[index] == (min(group, key=lambda other: ids[other]) if alive[index] else index)


def test_removals_do_not_depend_on_order_or_shards(tmp_path):
    draw = random.Random(0)
    texts = [f"text {draw.randrange(60)}" for _ in range(200)] + ["", ""]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    first = oracles.removed(Exact(), tmp_path / "first", texts, ids)
    assert len(first) == len(texts) - len(set(texts))
    rows = list(zip(texts, ids))
    draw.shuffle(rows)
    assert oracles.removed(Exact(), tmp_path / "again", *map(list, zip(*rows)), 9) == first
