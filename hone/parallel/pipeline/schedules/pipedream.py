"""PipeDream: a pipeline without flush, whose weights change between microbatches.

Narayanan et al. 2019 (arXiv:1806.03377): weight stashing and vertical sync; Narayanan et al. 2021 (arXiv:2006.09503): two
buffered versions (2BW). PipeDream-Flush is 1F1B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hone.base.errors import SpecError
from hone.cost.pipeline.table import Op, Table, frozen, loop
from hone.parallel.pipeline.schedules.one_forward_one_backward import alternating


def pipedream(ranks: int, microbatches: int) -> Table:
    """A step per microbatch; B reads the version that its F read (weight stashing). Rank r holds min(n, p-r) versions."""
    return _stepping("PipeDream", ranks, microbatches, 1, lambda current, number: current)


def pipedream_vertical(ranks: int, microbatches: int) -> Table:
    """As PipeDream, but a microbatch reads on every stage the version that the first stage read (vertical sync)."""
    return _stepping(
        "PipeDream with vertical sync", ranks, microbatches, 1, lambda _, number: max(0, number - ranks + 1)
    )


def pipedream_2bw(ranks: int, microbatches: int, accumulation: int | None = None) -> Table:
    """A step per `accumulation` microbatches (p), read one step later: two versions a rank, staleness 1."""
    each = accumulation or ranks
    if each < ranks or microbatches % each:
        raise SpecError(
            f"PipeDream-2BW with {microbatches} microbatches, {each} a step, over {ranks} ranks",
            fix=f"use a multiple of a step's microbatches, at least {ranks} of them",
        )
    return _stepping("PipeDream-2BW", ranks, microbatches, each, lambda _, number: max(0, number // each - 1))


def _stepping(name: str, ranks: int, microbatches: int, each: int, version: Callable[[int, int], int]) -> Table:
    """1F1B with a step after every `each` backwards; `version(current, microbatch)` is what a forward reads."""
    table = []
    for rank in range(ranks):
        found: list[Op] = []
        read: dict[int, int] = {}
        done: Counter[str] = Counter()
        for op in alternating(rank, microbatches, ranks - 1 - rank):
            done[op.kind] += 1
            if op.kind == "F":
                read[op.microbatch] = version(done["B"] // each, op.microbatch)
            found.append(op._replace(version=read[op.microbatch]))
            if op.kind == "B" and done["B"] % each == 0:
                found.append(Op("S", rank, version=done["B"] // each))
        table.append(found)
    return Table(name, frozen(table), ranks, microbatches, loop(ranks), microbatches // each)
