"""Numbers of decoding sequences that a GPU computes faster than slightly smaller ones: measured, because a library's choices are not known.

cuBLAS takes another kernel for other numbers of rows, and some choices are slow: the four products of an 8B layer take 399 us for 448
rows on an H200 and 299 us for 480 (benchmarks/ledger/ops.jsonl). A step of 448 sequences is then better padded to 480.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hone.model.decoder import Decoder
from hone.model.linear import Dense
from hone.ops import linear

_LAYERS, _TURNS = 4, 3
"""Layers whose products are timed, more than the L2 cache holds, and how often; the best time counts."""

_NEAR, _GAIN = 1.25, 0.9
"""A size is padded by at most this factor, to the first whose products take at most this part of its own products' time: times of
equally fast sizes differ by 5 % from one measurement to the next, and the same sizes are to be found in every process."""


def fast_sizes(sizes: Sequence[int], seconds: Sequence[float]) -> dict[int, int]:
    """For each of `sizes` the one that serves it best; `seconds` are what the products of each take."""
    found = {}
    for size, own in zip(sizes, seconds, strict=True):
        faster = [one for one, taken in zip(sizes, seconds) if size < one <= _NEAR * size and taken <= _GAIN * own]
        found[size] = min(faster, default=size)
    return found


@torch.inference_mode()
def product_seconds(model: Decoder, sizes: Sequence[int]) -> list[float] | None:
    """Seconds of the dense products of some layers for each number of rows; None where there are none on a GPU."""
    weights = [one.weight for layer in model.layers[:_LAYERS] for one in layer.modules() if type(one) is Dense]
    if not weights or not all(one.is_cuda for one in weights):
        return None
    how = {"device": weights[0].device, "dtype": weights[0].dtype}
    # The generator of a training in this process must not move on.
    how["generator"] = torch.Generator(how["device"]).manual_seed(0)
    widths = {one.shape[1] for one in weights}
    found = []
    for size in sizes:
        rows = {width: torch.randn(size, width, **how) for width in widths}
        graph = torch.cuda.CUDAGraph()
        for weight in weights:  # sets libraries up before the capture
            linear(rows[weight.shape[1]], weight)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for weight in weights:
                linear(rows[weight.shape[1]], weight)
        found.append(min(_seconds(graph) for _ in range(_TURNS)))
        graph.reset()
    return found


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
