"""Trees of guesses: several candidates of a place, all of which one pass of the model verifies.

Miao et al. 2024 (SpecInfer, arXiv:2305.09781), Cai et al. 2024 (Medusa, arXiv:2401.10774). Node 0 is the last token that is known, and a path
from it to any node a text that may follow. Nodes 1 ... k are the first choices of every place, one after another, so that the first k
guesses of a tree are a chain; a node stands behind its parent. A chain is the tree of these alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_NODES = 63
"""Most nodes: those that a node attends to are bits of an int64."""


@dataclass(frozen=True)
class Tree:
    """By node: its parent (-1 of the root), and which choice of its place it is, 0 the first."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def chain(cls, k: int) -> Tree:
        """The first choices of k places."""
        return cls(tuple(range(-1, k)), (0,) * (k + 1))

    @classmethod
    def grown(cls, chances: Sequence[Sequence[float]], num_nodes: int, *, branches: bool) -> Tree:
        """The chain of len(chances) places, and beside it the nodes, `num_nodes` in all, that are most often on the path that is kept.

        chances[d][r]: the chance that choice r of place d is right where those before it are. Without `branches` only nodes of the chain
        have children: where choices of a place depend on those before it, and are known behind the first ones alone.
        """
        depth = len(chances)
        tree, worth = cls.chain(depth), [1.0]
        for place in chances:
            worth.append(worth[-1] * place[0])
        parents, ranks, depths = list(tree.parents), list(tree.ranks), list(range(depth + 1))
        coming: list[tuple[float, int, int]] = []  # minus its worth, parent, rank: the best first

        def offer(parent: int, rank: int) -> None:
            place = depths[parent]
            if place < depth and rank < len(chances[place]):
                heapq.heappush(coming, (-worth[parent] * chances[place][rank], parent, rank))

        for node in range(depth):
            offer(node, 1)
        while coming and len(parents) < num_nodes:
            value, parent, rank = heapq.heappop(coming)
            node = len(parents)
            parents.append(parent)
            ranks.append(rank)
            depths.append(depths[parent] + 1)
            worth.append(-value)
            offer(parent, rank + 1)
            if branches:
                offer(node, 0)
        return cls(tuple(parents), tuple(ranks))

    def first(self, num_nodes: int) -> Tree:
        """The tree of the first `num_nodes` nodes at most, the chain in any case."""
        return Tree(self.parents[: max(num_nodes, self.depth + 1)], self.ranks[: max(num_nodes, self.depth + 1)])

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """The place of each node, 0 of the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return found

    @property
    def depth(self) -> int:
        """k: the most guesses that may be kept."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """The most choices of a place."""
        return max(self.ranks) + 1

    @property
    def is_chain(self) -> bool:
        return len(self) == self.depth + 1

    def seen(self) -> list[int]:
        """By node, as bits, the nodes that it attends to: those on its path, itself included."""
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append((found[parent] if parent >= 0 else 0) | 1 << node)
        return found

    def on(self, device: torch.device | str) -> Tensor:
        """int64 [4, len(self)]: parents, depths, ranks, and `seen`."""
        return torch.tensor([self.parents, self.depths, self.ranks, self.seen()], device=device)
