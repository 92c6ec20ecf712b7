"""Breadth-first: several stages a rank, all microbatches of one before the next (Lamy-Poirier 2022, arXiv:2211.05953)."""

from __future__ import annotations

from hone.cost.pipeline.table import Op, Table, frozen, loop


def breadth_first(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Table:
    """Bubble (p-1)/(v*n+p-1) for n >= p; v*n activations of a stage. A stage's weights are gathered once a direction."""
    chunks, numbers = range(stages_per_rank), range(microbatches)
    ops = [
        [Op("F", chunk * ranks + rank, number) for chunk in chunks for number in numbers]
        + [Op("B", chunk * ranks + rank, number) for chunk in reversed(chunks) for number in numbers]
        for rank in range(ranks)
    ]
    return Table("breadth-first", frozen(ops), ranks * stages_per_rank, microbatches, loop(ranks))
