"""Union-find and the choice of representatives against walking the graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.text.dedup import union_find
from hone.text.dedup.union_find import lowest_ids
from tests.text.dedup import oracles

GRAPHS = st.integers(1, 40).flatmap(
    lambda count: st.tuples(
        st.just(count), st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=60)
    )
)


def roots(count: int, edges: list[tuple[int, int]], kind: type = np.int64) -> list[int]:
    parents = union_find.singles(count).astype(kind)
    array = np.array(edges, kind).reshape(-1, 2)
    union_find.join(parents, array[:, 0], array[:, 1])
    union_find.flatten(parents)
    return parents.tolist()


@settings(max_examples=150)
@given(GRAPHS, st.randoms(use_true_random=False))
def test_components_in_any_order_of_edges(graph, draw):
    count, edges = graph
    expected = oracles.components(count, edges)
    assert roots(count, edges) == expected
    draw.shuffle(edges)
    assert roots(count, [edge[::-1] for edge in edges]) == expected


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_large_random_graphs_and_chains(kind):
    draw = np.random.default_rng(3)
    for count, num_edges in ((20_000, 9_000), (20_000, 30_000)):
        edges = [tuple(edge) for edge in draw.integers(0, count, (num_edges, 2)).tolist()]
        assert roots(count, edges, kind) == oracles.components(count, edges)
    chain = [(node, node + 1) for node in range(5000)]
    assert set(roots(5001, chain[::-1], kind)) == set(roots(5001, chain, kind)) == {0}


def test_parents_are_small_numbers_where_they_fit():
    assert union_find.singles(10).dtype == union_find.kind_of((1 << 31) - 1) == np.int32
    assert union_find.kind_of(1 << 31) == np.int64


@settings(max_examples=100)
@given(GRAPHS, st.data())
def test_the_lowest_id_stands_for_its_group(graph, data):
    count, edges = graph
    groups = np.array(oracles.components(count, edges))
    ids = data.draw(st.lists(st.text("ab\u00e9\U0001f98a", max_size=3), min_size=count, max_size=count))
    expected = [min(np.flatnonzero(groups == group), key=lambda index: ids[index]) for group in groups]
    assert lowest_ids(groups.copy(), np.array(ids)).tolist() == expected
    assert lowest_ids(groups.copy(), np.array(ids, object)).tolist() == expected
    numbers = np.array([hash(text) % 7 for text in ids], np.uint64)
    expected = [min(np.flatnonzero(groups == group), key=lambda index: numbers[index]) for group in groups]
    assert lowest_ids(groups.copy(), numbers).tolist() == expected


def test_no_documents():
    assert lowest_ids(np.empty(0, np.int64), np.empty(0, "U1")).tolist() == []
    assert roots(3, []) == [0, 1, 2]
