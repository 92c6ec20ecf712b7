"""Naive model parallelism: one microbatch at a time passes all ranks, and all but one rank wait."""

from __future__ import annotations

from hone.cost.pipeline.table import Op, Table, frozen, loop


def naive(ranks: int, microbatches: int) -> Table:
    """Bubble 1 - 1/p; one activation a rank."""
    ops = [[Op(kind, rank, number) for number in range(microbatches) for kind in ("F", "B")] for rank in range(ranks)]
    return Table("naive", frozen(ops), ranks, microbatches, loop(ranks))
