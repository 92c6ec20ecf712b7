"""Checkpoints of every layout of a training, products of axes too, are read by others: every axis by every axis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.data_parallel.test_data_parallel import HSDP, handed_over

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"data_parallel": "ddp"}),
    (2, {"data_parallel": "zero1"}),
    (4, {"data_parallel": "zero2"}),
    (4, {"data_parallel": "zero3"}),
    (4, {"data_parallel": HSDP}),
    (2, {"tensor_parallel_degree": 2}),
    (2, {"context_parallel_degree": 2}),
    (2, {"pipeline_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 2, "data_parallel": "zero3"}),
    (4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    (4, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    (4, {"context_parallel_degree": 2, "data_parallel": "zero3"}),
    (4, {"pipeline_parallel_degree": 2, "data_parallel": "zero1"}),
]
PAIRS = [(reader, writer) for reader in range(len(LAYOUTS)) for writer in range(len(LAYOUTS))]
SAMPLE = [(reader, writer) for reader, writer in PAIRS if (reader - writer) % len(LAYOUTS) == 8]
"""One diagonal, in which every layout writes and reads once."""


def covering(pairs: list[tuple[int, int]], begun: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of `pairs` that `begun` lacks: together, whatever a layout has (an axis with its degree or technique, a number of
    ranks) reads what whatever a layout has wrote. A product of axes is no more than its axes to a checkpoint, which is of whole
    tensors by name."""

    def meet(reader: int, writer: int) -> set[tuple[Any, Any]]:
        ours, theirs = (
            [num_ranks, *map(repr, layout.items())] for num_ranks, layout in (LAYOUTS[reader], LAYOUTS[writer])
        )
        return {(one, other) for one in ours for other in theirs}

    missing = set().union(*(meet(*pair) for pair in pairs)) - set().union(*(meet(*pair) for pair in begun))
    chosen = []
    while missing:
        chosen.append(max(pairs, key=lambda pair: len(meet(*pair) & missing)))
        missing -= meet(*chosen[-1])
    return chosen


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(covering(PAIRS, SAMPLE), id="covering", marks=pytest.mark.slow(seconds=40)),
    ],
)
def test_layouts_read_each_others_checkpoints(pairs, data_folder, tmp_path):
    layouts = [
        (
            num_ranks,
            {"parallelism": layout, "gradient_accumulation_steps": 2, "optimizer": "muon", "model": {"num_layers": 2}},
        )
        for num_ranks, layout in LAYOUTS
    ]
    (whole, final), *found = handed_over(layouts, pairs, data_folder, tmp_path)
    assert len(found) == len(pairs)
    for steps, weights in found:
        assert len(steps) == 1 and steps[0] == pytest.approx(whole[-1], rel=2e-5)
        for name, one in final.items():
            assert (weights[name] - one).abs().max() <= 4e-6, name
