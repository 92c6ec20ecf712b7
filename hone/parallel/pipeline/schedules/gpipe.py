"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""

from __future__ import annotations

from hone.cost.pipeline.table import Op, Table, frozen, loop


def gpipe(ranks: int, microbatches: int) -> Table:
    """Bubble (p-1)/(n+p-1); n activations a rank."""
    ops = [[Op(kind, rank, number) for kind in ("F", "B") for number in range(microbatches)] for rank in range(ranks)]
    return Table("GPipe", frozen(ops), ranks, microbatches, loop(ranks))
