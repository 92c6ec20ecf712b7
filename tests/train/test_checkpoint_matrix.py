"""Checkpoints of every layout of a training, products of axes too, are read by every other one."""

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
"""All of them; the default tier takes those of one diagonal, in which every layout writes and reads once."""


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([one for one in PAIRS if (one[0] - one[1]) % len(LAYOUTS) == 8], id="sample"),
        pytest.param(PAIRS, id="all", marks=pytest.mark.slow),
    ],
)
def test_every_layout_reads_the_checkpoints_of_every_other(pairs, data_folder, tmp_path):
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
