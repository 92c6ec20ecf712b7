"""Placement of experts: copies and packs against every possibility, and weights that stay where they are."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest

from hone.serve.experts.balancing import aligned, copies_of, imbalance, packed, placed, rank_loads

SEEDS = range(20)


def compositions(total: int, parts: int):
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def best_split(weights: np.ndarray, packs: int) -> float:
    """The least heaviest pack of all divisions into packs of one size."""
    size = len(weights) // packs

    def search(left: tuple[int, ...], heaviest: float) -> float:
        if not left:
            return heaviest
        first, found = left[0], np.inf
        for others in combinations(left[1:], size - 1):
            own = (first, *others)
            rest = tuple(one for one in left if one not in own)
            found = min(found, search(rest, max(heaviest, weights[list(own)].sum())))
        return found

    return search(tuple(range(len(weights))), 0.0)


def longest_first(weights: np.ndarray, packs: int) -> float:
    total, count = np.zeros(packs), np.zeros(packs, dtype=int)
    for one in sorted(weights, reverse=True):
        to = min((at for at in range(packs) if count[at] < len(weights) // packs), key=lambda at: total[at])
        total[to] += one
        count[to] += 1
    return total.max()


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_make_the_busiest_copy_as_light_as_any_choice(seed: int) -> None:
    load = np.random.default_rng(seed).gamma(0.5, 100, 5)
    found = copies_of(load, 9)
    assert found.sum() == 9 and found.min() >= 1
    assert (load / found).max() == pytest.approx(min((load / np.array(one)).max() for one in compositions(9, 5)))


@pytest.mark.parametrize("packs", [2, 4])
def test_packs_are_near_the_lightest_and_no_worse_than_longest_first(packs: int) -> None:
    ratios, greedy = [], []
    for seed in SEEDS:
        weights = np.random.default_rng(seed).gamma(0.7, 10, 8)
        pack = packed(weights, packs)
        assert np.bincount(pack, minlength=packs).tolist() == [8 // packs] * packs
        heaviest, least = np.bincount(pack, weights).max(), best_split(weights, packs)
        assert least - 1e-9 <= heaviest <= longest_first(weights, packs) + 1e-9
        ratios.append(heaviest / least)
        greedy.append(longest_first(weights, packs) / least)
    assert max(ratios) < 1.05 and np.mean(ratios) < 1.005
    assert np.mean(ratios) <= np.mean(greedy)


@pytest.mark.parametrize(("ranks", "redundant"), [(4, 0), (4, 4), (8, 8)])
def test_every_expert_has_a_slot_and_ranks_are_balanced(ranks: int, redundant: int) -> None:
    loads = np.random.default_rng(0).gamma(0.6, 1000, (3, 24))
    slots = placed(loads, ranks, redundant)
    assert slots.shape == (3, 24 + redundant) and all(set(row) == set(range(24)) for row in slots.tolist())
    start = np.stack([np.arange(24 + redundant) % 24] * 3)
    assert (imbalance(loads, slots, ranks) <= imbalance(loads, start, ranks)).all()
    assert rank_loads(loads, slots, ranks).sum(1) == pytest.approx(loads.sum(1))
    if redundant:
        assert imbalance(loads, slots, ranks).max() < 1.1


def test_groups_stay_on_a_node() -> None:
    loads = np.random.default_rng(1).gamma(1.0, 100, (2, 16))
    slots = placed(loads, 4, 8, num_groups=8, num_nodes=2)
    for row in slots:
        nodes = [set(one.tolist()) for one in row.reshape(2, -1)]
        assert nodes[0] | nodes[1] == set(range(16)) and not nodes[0] & nodes[1]
        assert all(len({expert // 2 for expert in one}) * 2 == len(one) for one in nodes), "whole groups of two"
    odd = placed(loads, 4, 8, num_groups=3, num_nodes=2)
    assert np.array_equal(odd, placed(loads, 4, 8)), "groups that nodes cannot share: as one node"


@pytest.mark.parametrize("seed", SEEDS)
def test_renamed_ranks_keep_weights_where_they_are(seed: int) -> None:
    random = np.random.default_rng(seed)
    before = np.stack([random.permutation(np.arange(10) % 8)])
    after = placed(random.gamma(1.0, 1.0, (1, 8)), 2, 2)
    found = aligned(after, before, 2)
    same = lambda one: sorted(map(sorted, one.reshape(2, -1).tolist()))  # noqa: E731
    assert same(found) == same(after)
    halves = list(after.reshape(2, -1))
    most = max(
        sum(
            np.minimum(np.bincount(a, minlength=8), np.bincount(b, minlength=8)).sum()
            for a, b in zip(order, before.reshape(2, -1))
        )
        for order in permutations(halves)
    )
    assert (found == before).sum() == most
    assert np.array_equal(aligned(before, before, 2), before)
