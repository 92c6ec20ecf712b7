"""The ranks of a training, as its loop sees them."""

from __future__ import annotations

from typing import NamedTuple

from hone.base.ranks import Mesh
from hone.parallel.grid import Grid
from hone.train.context_parallel.context import ContextRanks
from hone.train.data_parallel.moves import Moves
from hone.train.data_parallel.sums import Sum
from hone.train.pipeline.passes import Pipeline


class Ranks(NamedTuple):
    """The ranks of a training: their meetings, their axes (None: one rank) and what a data-parallel rank holds a part of."""

    mesh: Mesh = Mesh()
    grid: Grid | None = None
    sharded: frozenset[str] = frozenset()
    context: ContextRanks | None = None
    """The ranks that share this one's sequences; None: it has whole ones."""
    summing: Sum | None = None
    """How copies add up a gradient; None: by the backend's all-reduce."""
    pipeline: Pipeline | None = None
    """The ranks of which each has some stages of the layers; None: it has all."""
    moves: Moves | None = None
    """How layers' weights and gradients travel; None: as they are."""

    @property
    def num_shards(self) -> int:
        """Ranks that share a copy of the optimizer state."""
        return 1 if self.grid is None or "optimizer" not in self.sharded else self.grid.copies.shard.size

    @property
    def data(self) -> tuple[int, int]:
        """(index, number) of the part of each batch that this rank reads."""
        return (0, 1) if self.grid is None else (self.grid.data_index, self.grid.degrees.dp)

    @property
    def counts_loss(self) -> bool:
        """As `Grid.counts_loss`."""
        return self.grid is None or self.grid.counts_loss

    @property
    def counts_tokens(self) -> bool:
        """As `Grid.counts_tokens`."""
        return self.grid is None or self.grid.counts_tokens
