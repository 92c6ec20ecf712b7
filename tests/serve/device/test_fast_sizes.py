"""Sizes of decode steps are padded to near ones that are faster, and to no others."""

from __future__ import annotations

import pytest
import torch

from hone.serve.device import graphs
from hone.serve.device.fast_sizes import fast_sizes, product_seconds
from hone.serve.device.graphs import StepGraphs, padded
from tests.serve.small import decoder


def test_a_slow_size_is_padded_to_a_near_one_that_is_faster() -> None:
    assert fast_sizes([416, 448, 480, 512], [240, 290, 190, 200]) == {416: 480, 448: 480, 480: 480, 512: 512}
    assert fast_sizes([64, 128, 256], [3, 2, 1]) == {64: 64, 128: 128, 256: 256}, "too far"
    assert fast_sizes([100, 110], [1.0, 0.92]) == {100: 100, 110: 110}, "too small a gain"
    assert fast_sizes([100, 110, 120], [3.0, 1.0, 0.98]) == {100: 110, 110: 110, 120: 120}, (
        "the smallest that is faster"
    )
    assert fast_sizes([], []) == {}


def test_a_model_without_a_gpu_has_no_times() -> None:
    assert product_seconds(decoder(), [128]) is None


def test_graphs_measure_once_and_only_beyond_the_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def seconds(model: object, sizes: list[int]) -> list[float]:
        asked.append(sizes)
        return [9.0 if size == 448 else 1.0 + size / 1000 for size in sizes]

    monkeypatch.setattr(graphs, "product_seconds", seconds)
    one = StepGraphs.__new__(StepGraphs)
    one._model, one._most, one._fast = decoder(), 512, None
    assert [one._padded(count) for count in (1, 3, 64)] == [1, 4, 64] and not asked
    assert [one._padded(count) for count in (65, 416, 417, 448, 449)] == [72, 416, 480, 480, 480]
    assert len(asked) == 1 and asked[0] == sorted({padded(count) for count in range(65, 513)})
    one._model, one._fast = torch.nn.Module(), None  # of ranks: their times may differ
    assert one._padded(448) == 448 and len(asked) == 1
