"""Seconds of a decoding step: on a CPU by operations, on a GPU as a CUDA graph that reads every weight and key once."""

from __future__ import annotations

from hone.base.figure import Estimate
from hone.cost.dims import ModelDims
from hone.cost.memory import BYTES
from hone.cost.roofline import matmul_rate, seconds, speed_of_light
from hone.cost.steps import AROUND_OPS, FORWARD_OPS, Product, moved_values, product_seconds, sum_up, traffic_seconds
from hone.measure.machine import Machine

STREAMED = 0.95
"""Fraction of the read rate that the GPU's kernels reach for weights (up to STREAM_ROWS rows) and pages. On an H200
(benchmarks/ledger/ops.jsonl): weights 0.97 to 0.92 with 1 to 16 rows, 0.91 and 0.87 with 64; pages 0.78 with one sequence of
32,768 tokens, 0.98 with 64 sequences of 4,096."""

QUANTIZED = 0.6
"""The same for weights of 4 or 8 bits, which are dequantized in the kernel: 0.52 to 0.71 and 0.60 to 0.85 there."""

PAGES_8 = 0.82
"""The same for pages of 8 bits, which are widened in the kernel: 0.77 to 0.85 there with 64 and 256 sequences."""

STREAM_ROWS = 64
"""Most rows for which hone's memory-bound kernel runs (hone.ops.dispatch, `linear`); beyond, the library's."""

KERNEL_S = 1.5e-6
"""Seconds of a kernel in a CUDA graph beside its traffic: its start, and the wait for the last block of the one before.
Small kernels of the same ledger take 3.6 to 4.7 us for 0.4 to 1.3 us of traffic; memory-bound products with 1 to 16 rows
take 1.0 to 2.3 us more than their traffic."""

LAYER_KERNELS = 7
"""Kernels of an attention layer beside its matmuls: two norms (one with the sum), rotation and page write, attention and
its merge, gate, last sum."""

ROUTED_KERNELS = 4
"""Kernels of a layer's experts whatever their number: the rest of the choice, two products and the sum; there is no gate."""

AROUND_KERNELS = 6
"""Embedding, angles (2), last norm, most likely token and its copy."""


def decode_step_seconds(
    dims: ModelDims,
    machine: Machine,
    *,
    num_seqs: int,
    context: int,
    dtype: str = "float32",
    weights_bytes: float | None = None,
    cache_width: float | None = None,
    in_place: bool = False,
    captured: bool = False,
    coded_gain: float = 1.0,
    shared: int = 0,
) -> Estimate:
    """One decoding step of `num_seqs` sequences that each attend to `context` cached positions.

    `weights_bytes` are the bytes of weights read (default: all of them in `dtype`; less when they are quantized).
    `cache_width`: bytes of a cached number in pages, where it is not that of `dtype`.
    `in_place`: a GPU's kernels read the pages in place; else they are gathered (read, written), then read.
    `captured`: the step is the replay of a CUDA graph, without launch overhead of kernels; implies `in_place`.
    `coded_gain`: how many times as fast as in `dtype` the layers' products are, where their weights are multiplied as codes.
    `shared`: the first so many positions are in the same pages for all, which the kernels of a captured step read once.
    """
    width = BYTES[dtype] if cache_width is None or not (in_place or captured) else cache_width
    # Keys and values of the sequences' cached positions.
    cached = width * num_seqs * dims.state_values(context)
    if captured and shared:
        again = dims.state_values(context) - dims.state_values(max(context - shared, 0))
        cached -= width * (num_seqs - 1) * again
    if in_place or captured:
        eight = width < BYTES[dtype] and width < 2
        return _in_place(dims, machine, num_seqs, cached, dtype, weights_bytes, captured, eight, coded_gain)
    products = _products(dims, num_seqs)
    gathered = 3.0 * cached
    weights_s = seconds(machine, num_bytes=weights_bytes, dtype=dtype).value if weights_bytes else 0.0
    parts = {
        f"{len(products)} matmuls": max(product_seconds(machine, products, dtype), weights_s),
        # Between two uses of a layer's pages those of all layers are used: they stay in a cache only if all fit.
        "pages": seconds(machine, num_bytes=gathered, op_bytes=gathered).value,
        "element-wise": traffic_seconds(machine, dims, num_seqs, dtype, backward=False),
    }
    return sum_up(machine, parts, decode_step_starts(dims), dtype)


def decode_step_starts(dims: ModelDims) -> float:
    """Starts of operations in one decoding step."""
    return sum(len(layer.matmuls) for layer in dims.layers) + 1 + FORWARD_OPS * dims.num_layers + AROUND_OPS


def _in_place(
    dims: ModelDims,
    machine: Machine,
    num_seqs: int,
    cached_bytes: float,
    dtype: str,
    weights_bytes: float | None,
    captured: bool,
    eight: bool,
    coded_gain: float,
) -> Estimate:
    """A step of the GPU's kernels: matmuls, then pages and activations at the read rate, and the gaps between kernels."""
    calibration = machine.calibration
    bound = calibration is None or dtype not in calibration.dtypes
    rate = speed_of_light(machine, dtype)[1] if bound else STREAMED * calibration.read_bytes_per_s
    products = _products(dims, num_seqs)
    weights_s = BYTES[dtype] * dims.read_params(num_seqs) / rate
    if weights_bytes is not None:
        everything = dims.matmul_params + sum((1.0 - one.routed.share) * one.routed.params for one in dims.layers)
        weights_bytes *= dims.read_params(num_seqs) / everything
        weights_s = weights_bytes / (rate if bound else QUANTIZED * calibration.read_bytes_per_s)
    head = dims.vocab_size * dims.hidden_size
    flops = 2.0 * num_seqs * ((dims.matmul_params - head) / coded_gain + head)
    if bound:
        matmuls_s = max(weights_s, flops / speed_of_light(machine, dtype)[0])
    elif num_seqs <= STREAM_ROWS or weights_bytes is not None:
        matmuls_s = max(weights_s, flops / matmul_rate(calibration, dtype, None))
    else:
        matmuls_s = max(weights_s, product_seconds(machine, products, dtype))
    kernels = len(products) + LAYER_KERNELS * dims.num_layers + AROUND_KERNELS
    kernels += sum(ROUTED_KERNELS - one.routed.products for one in dims.layers if one.routed.products)
    parts = {
        f"{len(products)} matmuls": matmuls_s,
        "pages": cached_bytes / (rate if bound or not eight else PAGES_8 / STREAMED * rate),
        "element-wise": BYTES[dtype] * num_seqs * moved_values(dims, backward=False) / rate,
    }
    if not bound:
        parts[f"{kernels:,} kernels"] = kernels * KERNEL_S
    return sum_up(machine, parts, 0 if captured else decode_step_starts(dims), dtype)


def _products(dims: ModelDims, num_seqs: int) -> list[Product]:
    products: list[Product] = [((num_seqs, *matmul), "forward") for layer in dims.layers for matmul in layer.matmuls]
    return [*products, ((num_seqs, dims.vocab_size, dims.hidden_size), "forward")]
