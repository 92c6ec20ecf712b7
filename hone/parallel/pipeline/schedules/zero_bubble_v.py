"""ZB-V: two stages a rank in a V, no bubble with 1F1B's memory (Qi et al. 2024, arXiv:2401.10241, section 6)."""

from __future__ import annotations

from collections import Counter

from hone.cost.pipeline.table import Kind, Op, Table, frozen, vee


def zb_v(ranks: int, microbatches: int) -> Table:
    """No idle between a rank's first and last pass when F, I and W take equal times; 2p activations of a half stage.

    Fewer than 2p-1 microbatches run the order of 2p-1 with the passes of the missing ones left out.
    """
    ops = [
        [op for op in _rank(rank, ranks, max(microbatches, 2 * ranks - 1)) if op.microbatch < microbatches]
        for rank in range(ranks)
    ]
    return Table("ZB-V", frozen(ops), 2 * ranks, microbatches, vee(ranks))


def _rank(rank: int, ranks: int, microbatches: int) -> list[Op]:
    """The passes of one rank: d of its stage on the way down, u of the one on the way up."""
    stages, done = {"d": rank, "u": 2 * ranks - 1 - rank}, Counter()
    found: list[Op] = []

    def add(times: int, passes: str) -> None:
        for _ in range(times):
            for one in passes.split():
                kind: Kind = one[0]  # type: ignore[assignment]
                found.append(Op(kind, stages[one[1]], done[one]))
                done[one] += 1

    add(2 * (ranks - rank) - 1, "Fd")
    add(rank, "Fu Fd")
    add(ranks - rank, "Fu Iu Wu")
    while done["Fu"] < microbatches:  # the steady state: three passes of each stage
        add(1 if done["Fd"] < microbatches else 0, "Fd")
        add(1, "Id Wd Fu Iu Wu")
    add(rank, "Id Iu")
    add(ranks - rank, "Id Wd")
    add(done["Iu"] - done["Wu"], "Wu")
    add(done["Id"] - done["Wd"], "Wd")
    return found
