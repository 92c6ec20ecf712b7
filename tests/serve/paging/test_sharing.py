"""Which pages a step's sequences share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hone.serve.paging.sharing import NONE_SHARED, SharedPages, shared_pages


def found(table: list[list[int]], ends: list[int], size: int = 4) -> SharedPages:
    return shared_pages(np.array(table, dtype=np.int32), np.array(ends, dtype=np.int32), size)


def test_the_longest_run_of_neighbours():
    table = [[1, 2, 0], [3, 4, 5], [3, 4, 6], [3, 4, 7], [8, 9, 0]]
    assert found(table, [8, 9, 12, 10, 7]) == (1, 4, 2)
    assert found(table, [8, 9, 8, 10, 7]) == (1, 4, 1), "the page of a new token is its own"
    assert found(table[3:], [10, 7]) == found(table[:1], [8]) == NONE_SHARED
    assert found([[3, 0], [3, 0]], [2, 3]) == NONE_SHARED, "no whole page"
    assert found([], []) == NONE_SHARED


def test_reading_once_pays_for_half_of_the_keys():
    ends = np.array([13, 14, 15, 16], dtype=np.int32)
    assert SharedPages(0, 4, 3).pays(ends, 4)  # 36 of 58
    assert not SharedPages(0, 3, 3).pays(ends, 4)  # 24 of 58
    assert not NONE_SHARED.pays(ends, 4) and not NONE_SHARED.pays(ends[:0], 4)


@given(st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=4, max_size=4), st.integers(1, 16)), max_size=9))
def test_shared_pages_are_exactly_the_pages_in_common(rows):
    table = np.array([row for row, _ in rows], dtype=np.int32).reshape(-1, 4)
    ends = np.array([end for _, end in rows], dtype=np.int32)
    begin, end, pages = shared_pages(table, ends, 4)
    if pages:
        assert 0 <= begin < end - 1 < len(rows)
        assert (table[begin:end, :pages] == table[begin, :pages]).all()
        assert (ends[begin:end] > 4 * pages).all()
        more = pages < 4 and (table[begin:end, : pages + 1] == table[begin, : pages + 1]).all()
        assert not (more and (ends[begin:end] > 4 * (pages + 1)).all())
