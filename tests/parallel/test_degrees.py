"""The grid of ranks: every rank has one place, neighbours share the innermost axis, and what does not divide is said."""

from __future__ import annotations

import itertools

import pytest

from hone.base.errors import SpecError
from hone.parallel.degrees import Degrees, data_ranks


def test_every_rank_has_one_place_and_lines_along_the_axes():
    degrees = Degrees(pp=2, dp_replicate=1, dp_shard=3, ep=2, cp=2, tp=2)
    assert degrees.num_ranks == 48 and degrees.dp == 6
    places = [degrees.place(rank) for rank in range(48)]
    assert places == [Degrees(*one) for one in itertools.product(*map(range, degrees))]
    for number in range(7):
        for axes in itertools.combinations(Degrees._fields, number):
            lines = degrees.lines(axes)
            assert sorted(itertools.chain(*lines)) == list(range(48))
            for line in lines:
                assert line == sorted(line)
                for name in set(Degrees._fields) - set(axes):
                    assert len({getattr(places[rank], name) for rank in line}) == 1
    assert degrees.lines(["tp"])[0] == [0, 1] and degrees.lines(["pp"])[0] == [0, 24]
    assert degrees.lines(["dp_shard", "tp"])[0] == [0, 1, 8, 9, 16, 17] and degrees.lines(["ep"])[0] == [0, 4]


def test_the_rest_goes_to_data_parallelism():
    assert data_ranks(16, tensor_parallel_degree=4, pipeline_parallel_degree=2) == 2
    with pytest.raises(SpecError, match="tensor_parallel_degree 3 does not divide 8 ranks") as caught:
        data_ranks(8, tensor_parallel_degree=3, pipeline_parallel_degree=1)
    assert "multiple of 3" in caught.value.fix and "parallelism.tensor_parallel_degree" in caught.value.fix
    with pytest.raises(SpecError, match="tensor_parallel_degree 4 x pipeline_parallel_degree 3 do not divide 16 ranks"):
        data_ranks(16, tensor_parallel_degree=4, pipeline_parallel_degree=3)
