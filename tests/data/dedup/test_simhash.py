"""SimHash: all pairs within the distance are joined and no others; near-identical documents are removed."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hone.data.dedup.simhash import SimHash
from hone.text.dedup import union_find
from hone.text.dedup.tables import Near, masks
from tests.text.dedup import oracles


@pytest.mark.parametrize("distance", range(8))
def test_joined_are_exactly_those_within_the_distance(distance):
    draw = random.Random(distance)
    values = [draw.getrandbits(64) for _ in range(60)]
    for _ in range(200):
        flips = draw.sample(range(64), draw.randrange(0, 11))
        values.append(draw.choice(values) ^ sum(1 << bit for bit in flips))
    draw.shuffle(values)
    near = [
        pair
        for pair in itertools.combinations(range(len(values)), 2)
        if (values[pair[0]] ^ values[pair[1]]).bit_count() <= distance
    ]
    parents = union_find.singles(len(values))
    rule = Near.of(len(values), distance)
    for table in range(rule.num_tables):
        rule.join(parents, np.array(values, np.uint64), table)
    union_find.flatten(parents)
    assert parents.tolist() == oracles.components(len(values), near)


@pytest.mark.parametrize("count", [0, 1, 10**4, 10**7, 10**9])
@pytest.mark.parametrize("distance", [1, 3, 7])
def test_tables_bring_every_near_pair_together(count, distance):
    tables = list(masks(count, distance))
    draw = random.Random(count)
    for _ in range(300):
        flipped = set(draw.sample(range(64), distance))
        assert any(flipped.isdisjoint(bits) for bits in tables)
    assert all(len(bits) == len(set(bits)) for bits in tables)
    chance = count / 2 ** min(len(bits) for bits in tables)
    assert chance < 64 or distance == 7, "too many documents share a key by chance"


def test_near_identical_texts_go_in_any_order(tmp_path):
    draw = random.Random(1)
    texts = []
    for number in range(60):
        words = [f"{draw.choice('abcdefgh')}{draw.randrange(3000)}" for _ in range(600)]
        texts.append(" ".join(words))
        words[draw.randrange(600)] = "changed"
        texts.append(" ".join(words) if number % 2 else texts[-1])
    texts += ["", "...", "one", "one"]
    ids = [oracles.identity(text, place) for place, text in enumerate(texts)]
    first = oracles.removed(SimHash(), tmp_path / "first", texts, ids)
    gone = [ids[2 * number] in first or ids[2 * number + 1] in first for number in range(60)]
    assert all(gone[::2]), "identical texts stayed"
    assert sum(gone[1::2]) >= 20, "one changed word of 600 moves few bits"
    assert ids[-4] not in first and ids[-3] not in first and len({ids[-1], ids[-2]} & set(first)) == 1
    rows = list(zip(texts, ids))
    draw.shuffle(rows)
    assert oracles.removed(SimHash(), tmp_path / "again", *map(list, zip(*rows)), 7) == first
