"""Interleaved 1F1B: several stages a rank in turn (Narayanan et al. 2021, arXiv:2104.04473).

With any number of microbatches as in Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from itertools import pairwise

from hone.base.errors import SpecError
from hone.cost.pipeline.table import Op, Table, frozen, loop


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2, contiguous: int | None = None) -> Table:
    """A stage takes `contiguous` microbatches in a row (p) before the rank's next stage takes them.

    Bubble (p-1)/(v*n+p-1) and 2(p-1) + (v-1)p + 1 activations of a stage on rank 0 when p divides n. More in a row
    hide transfers and hold more. What is left after the last full row joins that row. Raises SpecError when fewer than p
    microbatches, or fewer than p in a row, are asked for: then a rank would wait for its own later pass.
    """
    row = contiguous or ranks
    if not ranks <= row <= microbatches:
        raise SpecError(
            f"interleaved 1F1B of {microbatches} microbatches, {row} in a row, over {ranks} ranks",
            fix=f"use at least {ranks} microbatches, and from {ranks} to that many in a row, or breadth_first",
        )
    begins = [*range(0, microbatches - row + 1, row), microbatches]
    rows = [range(begin, end) for begin, end in pairwise(begins)]
    order = [(number, chunk) for one in rows for chunk in range(stages_per_rank) for number in one]
    longest, ops = max(map(len, rows)), []
    for rank in range(ranks):
        forwards = [Op("F", chunk * ranks + rank, number) for number, chunk in order]
        backwards = [Op("B", (stages_per_rank - 1 - chunk) * ranks + rank, number) for number, chunk in order]
        ahead = min(len(order), 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * longest)
        turns = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
        ops.append(forwards[:ahead] + turns + backwards[len(order) - ahead :])
    return Table("interleaved 1F1B", frozen(ops), ranks * stages_per_rank, microbatches, loop(ranks))
