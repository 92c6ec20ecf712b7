"""Visits of experts over two nodes of two ranks: results and gradients of one process, and a row a node between nodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hone.base.errors import SpecError
from hone.parallel.collectives.two_level_experts import visit_experts
from tests.parallel.two_level_ranks import WIDTH, drawn, visited
from tests.ranked import together


@pytest.mark.parametrize(("top_k", "groups"), [(1, 2), (3, 2), (4, 1)])
def test_results_gradients_and_bytes(top_k: int, groups: int) -> None:
    ended = together(4, visited, top_k, groups)
    for rank, one in enumerate(ended):
        assert one.returncode == 0, one.stderr[-2000:]
        assert max(one.result["errors"]) < 1e-12
        _, ids, _ = drawn(rank, top_k, groups)
        mine = rank // 2
        rows = int((ids // 4 == 1 - mine).any(1).sum())
        other = drawn(rank + 2 if mine == 0 else rank - 2, top_k, groups)[1]
        returned = int((other // 4 == mine).any(1).sum())
        # There: a row with its ids and weights; back: one row of each token of the other node's rank. Beside: how many.
        wanted = rows * (WIDTH + 2 * top_k) * 8 + returned * WIDTH * 8
        assert one.result["between"] == wanted + 8


def test_a_node_costs_one_row_and_not_one_a_visit() -> None:
    """Four experts of one node: a quarter of the rows of an exchange by visits."""
    sent = [one.result["between"] for one in together(4, visited, 4, 1)]
    visits = [drawn(rank, 4, 1)[1] for rank in range(4)]
    by_visits = sum(int((ids // 4 != rank // 2).sum()) for rank, ids in enumerate(visits)) * WIDTH * 8 * 2
    there = sum(int((ids // 4 != rank // 2).any(1).sum()) for rank, ids in enumerate(visits))
    rows = there * WIDTH * 8 * 2
    assert rows * 4 == by_visits
    said = there * 2 * 4 * 8 + 4 * 8  # ids and weights of each row, and how many rows come
    assert sum(sent) == rows + said < by_visits


def test_experts_that_ranks_do_not_divide_are_said() -> None:
    two = SimpleNamespace(size=2, index=0)
    x, ids, weights = torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for count in (0, 2, 6):
        with pytest.raises(SpecError, match=f"{count} experts cannot be divided among 2 nodes of 2 ranks"):
            visit_experts(two, two, x, ids, weights, count, lambda rows, ends: rows)  # type: ignore[arg-type]
