"""Which rank has which experts, from their loads: busy experts get copies, and ranks equal loads. Never imports torch.

The steps are those of EPLB (DeepSeek-AI 2024, arXiv:2412.19437, section 3.4): copies go to the expert with the most load a copy, then
the largest go to the rank with the least so far that has room (longest processing time first, Graham 1969). Pairs are exchanged
afterwards while that lowers the busiest rank. Legend: L layers, E experts, S slots (experts and copies), N ranks.
"""

from __future__ import annotations

import numpy as np


def placed(
    loads: np.ndarray, num_ranks: int, num_redundant: int = 0, *, num_groups: int = 1, num_nodes: int = 1
) -> np.ndarray:
    """int64 [L, S]: the expert of each slot, the slots of rank 0 first; `loads` [L, E] are tokens, S = E + `num_redundant`.

    With `num_nodes` > 1 and groups that divide among them (`num_groups`, of neighbouring experts among which a router chooses), whole
    groups are put on nodes first, so that a token's copies of a group are on one node (EPLB's hierarchical form). S must be a multiple
    of `num_ranks`, and these of `num_nodes`.
    """
    loads = np.asarray(loads, dtype=np.float64)
    num_slots = loads.shape[1] + num_redundant
    assert num_slots % num_ranks == 0 and num_ranks % num_nodes == 0, (num_slots, num_ranks, num_nodes)
    if num_nodes > 1 and num_groups % num_nodes == 0:
        return np.stack([_by_nodes(layer, num_ranks, num_slots, num_groups, num_nodes) for layer in loads])
    return np.stack([_over(layer, num_ranks, num_slots) for layer in loads])


def copies_of(load: np.ndarray, num_slots: int) -> np.ndarray:
    """int64 [E]: copies of each expert, one at least, `num_slots` in all, such that the largest load a copy is the least possible."""
    copies = np.ones(len(load), dtype=np.int64)
    for _ in range(num_slots - len(load)):
        copies[np.argmax(load / copies)] += 1
    return copies


def packed(weights: np.ndarray, num_packs: int) -> np.ndarray:
    """int64 [M]: the pack of each of M items, as many in every pack, such that the heaviest pack is light."""
    room = len(weights) // num_packs
    pack, total = np.empty(len(weights), dtype=np.int64), np.zeros(num_packs)
    count = np.zeros(num_packs, dtype=np.int64)
    for item in np.argsort(-weights, kind="stable"):
        to = int(np.argmin(np.where(count < room, total, np.inf)))
        pack[item] = to
        total[to] += weights[item]
        count[to] += 1
    return _exchanged(weights, pack, total)


def imbalance(loads: np.ndarray, slots: np.ndarray, num_ranks: int) -> np.ndarray:
    """float64 [L]: the busiest rank's load / the mean, of `loads` [L, E] on `slots` [L, S]; copies of an expert share its load evenly."""
    busy = rank_loads(loads, slots, num_ranks)
    return busy.max(1) / np.maximum(busy.mean(1), 1e-30)


def rank_loads(loads: np.ndarray, slots: np.ndarray, num_ranks: int) -> np.ndarray:
    """float64 [L, N]: the load of every rank."""
    found = []
    for load, own in zip(np.asarray(loads, dtype=np.float64), slots):
        share = load / np.maximum(np.bincount(own, minlength=len(load)), 1)
        found.append(share[own].reshape(num_ranks, -1).sum(1))
    return np.stack(found)


def aligned(slots: np.ndarray, before: np.ndarray, num_ranks: int) -> np.ndarray:
    """`slots` [L, S] with ranks renamed, and slots of a rank reordered, such that most weights are where `before` [L, S] has them."""
    return np.stack([_kept(new, old, num_ranks) for new, old in zip(slots, before)])


def _over(load: np.ndarray, num_ranks: int, num_slots: int) -> np.ndarray:
    """One layer over ranks that are all alike."""
    copies = copies_of(load, num_slots)
    experts = np.repeat(np.arange(len(load)), copies)
    pack = packed((load / copies)[experts], num_ranks)
    return experts[np.argsort(pack, kind="stable")]


def _by_nodes(load: np.ndarray, num_ranks: int, num_slots: int, num_groups: int, num_nodes: int) -> np.ndarray:
    """One layer: groups over nodes, then copies and ranks within each node."""
    members = np.arange(len(load)).reshape(num_groups, -1)
    node = packed(load[members].sum(1), num_nodes)
    own = [members[node == one].flatten() for one in range(num_nodes)]
    ranks, slots = num_ranks // num_nodes, num_slots // num_nodes
    return np.concatenate([experts[_over(load[experts], ranks, slots)] for experts in own])


def _exchanged(weights: np.ndarray, pack: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Exchanges an item of the heaviest pack with one of another as long as the heavier of both gets lighter."""
    for _ in range(4 * len(weights)):
        heavy = int(total.argmax())
        mine, others = np.flatnonzero(pack == heavy), np.flatnonzero(pack != heavy)
        if not len(others):
            return pack
        moved = weights[mine][:, None] - weights[others][None]  # what the heaviest gives away
        after = np.maximum(total[heavy] - moved, total[pack[others]][None] + moved)
        best = int(after.argmin())
        if after.flat[best] >= total[heavy] * (1 - 1e-12):
            return pack
        give, take = mine[best // len(others)], others[best % len(others)]
        to, by = int(pack[take]), weights[give] - weights[take]
        total[heavy] -= by
        total[to] += by
        pack[give], pack[take] = to, heavy
    return pack


def _kept(new: np.ndarray, old: np.ndarray, num_ranks: int) -> np.ndarray:
    experts = int(max(new.max(), old.max())) + 1
    wanted, there = new.reshape(num_ranks, -1), old.reshape(num_ranks, -1)
    count = [np.stack([np.bincount(row, minlength=experts) for row in rows]) for rows in (wanted, there)]
    same = np.minimum(count[0][:, None], count[1][None]).sum(2)  # [new rank, old rank]: weights that stay
    found = there.copy()
    for _ in range(num_ranks):
        pack, rank = divmod(int(same.argmax()), num_ranks)
        same[pack, :], same[:, rank] = -1, -1
        found[rank] = _ordered(wanted[pack], there[rank])
    return found.flatten()


def _ordered(wanted: np.ndarray, there: np.ndarray) -> np.ndarray:
    """`wanted` with experts that are there already in their slots."""
    found, coming = np.full(len(there), -1, dtype=np.int64), wanted.tolist()
    for slot, expert in enumerate(there.tolist()):
        if expert in coming:
            coming.remove(expert)
            found[slot] = expert
    found[found < 0] = coming
    return found
