"""The readable collectives agree with gloo's own on 2, 3 and 4 ranks, end when a rank ends, and cost what their formulas say."""

from __future__ import annotations

import pytest

from hone.cost.ranks import Transfers, messages_and_bytes
from hone.measure.calibration import CollectiveTime
from tests.parallel.collective_ranks import ended, measured, wrong
from tests.ranked import together


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_collective_gives_what_gloo_gives(num_ranks):
    for one in together(num_ranks, wrong):
        assert one.returncode == 0, one.stderr[-2000:]
        assert one.result == []


def test_a_rank_that_ends_ends_the_ring():
    killed = together(2, ended, "killed")
    assert killed[0].result.startswith("Lost: rank 0 lost") and killed[1].returncode < 0
    raised = together(2, ended, "raised")
    assert raised[1].result == "ZeroDivisionError: a bug"
    assert raised[0].result == "MachineError: rank 1 failed: ZeroDivisionError: a bug"


def test_ranks_measure_one_table():
    tables = [one.result for one in together(4, measured, [4096, 65536])]
    assert tables[0] == tables[1] == tables[2] == tables[3]
    rows = [CollectiveTime(**row) for row in tables[0]]
    assert {row.ranks for row in rows} == {2, 4} and {row.num_bytes for row in rows} == {4096, 65536}
    assert {row.algorithm for row in rows if row.op == "all_reduce"} == {
        "backend",
        "ring",
        "halving",
        "doubling",
        "tree",
    }
    times = Transfers("cpu", rows)
    for row in rows:
        if row.algorithm == "backend":
            assert times.seconds(row.op, row.ranks, row.num_bytes) == pytest.approx(row.seconds)
    assert times.said == "measured by hone calibrate"
    assert times.seconds("all_reduce", 8, 4096) > 0 and times.said == "link rates are not calibrated"


def test_seconds_between_and_beyond_the_sizes_of_a_table():
    def row(num_bytes: int, seconds: float) -> CollectiveTime:
        return CollectiveTime(op="all_reduce", algorithm="backend", ranks=4, num_bytes=num_bytes, seconds=seconds)

    times = Transfers("cuda", [row(3000, 4.0), row(1000, 2.0)])
    assert [times.seconds("all_reduce", 4, size) for size in (10, 1000, 2000, 3000, 6000)] == [2, 2, 3, 4, 8]
    assert times.seconds("all_reduce", 1, 10) == 0


def test_messages_and_bytes_are_those_of_the_papers():
    """Thakur et al. 2005, section 4: on 8 ranks, of 8 bytes."""
    assert messages_and_bytes("all_reduce", "ring", 8, 8) == (14, 14)
    assert messages_and_bytes("all_reduce", "halving", 8, 8) == (6, 14)
    assert messages_and_bytes("all_reduce", "doubling", 8, 8) == (3, 24)
    assert messages_and_bytes("all_reduce", "tree", 8, 8) == (6, 48)
    assert messages_and_bytes("reduce_scatter", "ring", 8, 8) == (7, 7)
    assert messages_and_bytes("all_reduce", "halving", 3, 8) == (4, 24)
    with pytest.raises(ValueError, match="no formula for all_gather by tree"):
        messages_and_bytes("all_gather", "tree", 4, 8)
