"""ZB-H1 and ZB-H2: weight gradients fill the time in which ranks would wait (Qi et al. 2024, arXiv:2401.10241)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hone.cost.pipeline.simulate import Costs
from hone.cost.pipeline.table import Op, Result, Table, deps, frozen, loop, results
from hone.parallel.pipeline.schedules.one_forward_one_backward import alternating


def zb_h1(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """Bubble (p-1)(F+I-W) instead of 1F1B's (p-1)(F+I+W), with no more than 1F1B's p activations."""
    return _zero_bubble("ZB-H1", ranks, microbatches, 1, ranks, costs)


def zb_h2(ranks: int, microbatches: int, costs: Costs | None = None) -> Table:
    """Idle (p-1)(F+I-2W), none at equal times and n >= 2p-1; up to 2p-1 activations.

    Free of bubble from step to step only when the ranks need not meet before the optimizer's step.
    """
    return _zero_bubble("ZB-H2", ranks, microbatches, 2, 2 * ranks - 1, costs)


def _zero_bubble(name: str, ranks: int, microbatches: int, ahead: int, most: int, costs: Costs | None) -> Table:
    ops = [alternating(rank, microbatches, ahead * (ranks - 1 - rank), "I") for rank in range(ranks)]
    return filled(Table(name, frozen(ops), ranks, microbatches, loop(ranks)), costs or Costs(), [most] * ranks)


def filled(table: Table, costs: Costs, most: Sequence[int]) -> Table:
    """The table of F and I with a W for each I, put where its rank would wait as long, or hold more than `most[rank]`.

    W are done in the order of their I, those left at the end. Passes are taken in the order of their time.
    """
    spots, clocks = [0] * len(table.ranks), [0.0] * len(table.ranks)
    found: list[list[Op]] = [[] for _ in table.ranks]
    queued: list[deque[Op]] = [deque() for _ in table.ranks]
    live, ended = [0] * len(table.ranks), {}

    def weights(rank: int) -> None:
        op = queued[rank].popleft()
        found[rank].append(op)
        clocks[rank] += costs.of(op)
        live[rank] -= 1

    def ready(rank: int) -> float | None:
        """When the next pass of a rank can begin, None while its input is not made."""
        needed: list[Result] = deps(table, table.ranks[rank][spots[rank]])
        if any(one not in ended for one in needed):
            return None
        away = [costs.transfer * (table.place(one.stage, one.microbatch) != rank) for one in needed]
        return max([clocks[rank], *(ended[one] + more for one, more in zip(needed, away, strict=True))])

    while any(spot < len(ops) for spot, ops in zip(spots, table.ranks, strict=True)):
        waiting = [rank for rank, ops in enumerate(table.ranks) if spots[rank] < len(ops)]
        begin, rank = min((at, rank) for rank in waiting if (at := ready(rank)) is not None)
        op = table.ranks[rank][spots[rank]]
        while queued[rank] and (
            clocks[rank] + costs.of(queued[rank][0]) <= begin + 1e-9 or (op.kind == "F" and live[rank] >= most[rank])
        ):
            weights(rank)
        clocks[rank] = max(begin, clocks[rank]) + costs.of(op)
        ended.update(dict.fromkeys(results(op), clocks[rank]))
        found[rank].append(op)
        spots[rank] += 1
        live[rank] += op.kind == "F"
        if op.kind == "I":
            queued[rank].append(op._replace(kind="W"))
    for rank in range(len(found)):
        while queued[rank]:
            weights(rank)
    return replace(table, ranks=frozen(found))
