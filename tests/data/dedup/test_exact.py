"""Exact duplicates against a dictionary of texts."""

from __future__ import annotations

import random

from hone.data.dedup.exact import Exact
from tests.text.dedup import oracles


def test_removals_do_not_depend_on_order_or_shards(tmp_path):
    draw = random.Random(0)
    texts = [f"text {draw.randrange(60)}" for _ in range(200)] + ["", ""]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    first = oracles.removed(Exact(), tmp_path / "first", texts, ids)
    assert len(first) == len(texts) - len(set(texts))
    rows = list(zip(texts, ids))
    draw.shuffle(rows)
    assert oracles.removed(Exact(), tmp_path / "again", *map(list, zip(*rows)), 9) == first
