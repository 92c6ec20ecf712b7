"""1F1B, PipeDream's order with a flush at every step (Narayanan et al. 2021, arXiv:2104.04473, figure 4)."""

from __future__ import annotations

from hone.cost.pipeline.table import Kind, Op, Table, frozen, loop


def one_forward_one_backward(ranks: int, microbatches: int) -> Table:
    """Bubble (p-1)/(n+p-1) as GPipe's; rank r holds min(n, p-r) activations."""
    ops = [alternating(rank, microbatches, ranks - 1 - rank) for rank in range(ranks)]
    return Table("1F1B", frozen(ops), ranks, microbatches, loop(ranks))


def alternating(rank: int, microbatches: int, ahead: int, backward: Kind = "B") -> list[Op]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, microbatches)
    found = [Op("F", rank, number) for number in range(ahead)]
    for number in range(microbatches):
        if number + ahead < microbatches:
            found.append(Op("F", rank, number + ahead))
        found.append(Op(backward, rank, number))
    return found
