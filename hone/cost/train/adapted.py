"""What adapters around frozen linears add to a training step: thin products, passes over outputs, casts of factors, decoded weights.

What `hone.ops.lora_linear` and `dora_linear` do, at calibrated rates. Shapes: T tokens, K inputs, N outputs, r rank of a piece, R of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hone.cost.cache import BYTES
from hone.cost.dims import ModelDims
from hone.cost.roofline import copy_rate, kernel_rate, matmul_seconds, seconds
from hone.cost.work import DEQUANTIZE_BYTES
from hone.measure.calibration import Layout
from hone.measure.machine import Machine

SMALL = 1 << 16
"""Bytes up to which an operation takes as long as one of these, which is calibrated."""

LENGTH_OPS = 14
"""Operations on a piece's [N, r] numbers and fewer with which DoRA finds the lengths of its rows, and the gradient of the lengths."""


class AdaptedLinear(NamedTuple):
    """A frozen linear under LoRA or DoRA."""

    in_features: int
    out_features: int
    """Of all pieces."""
    pieces: tuple[tuple[int, int], ...]
    """(rows, rank) of each wrapped piece."""
    stretched: bool = False
    """DoRA: rows get a trained length."""
    gated: bool = False
    """Its inputs are a SwiGLU's, which the backward pass computes again."""


class Added(NamedTuple):
    """What is added to a step."""

    seconds: float = 0.0
    starts: int = 0
    """Operations that are started."""


def added_by_adapters(machine: Machine, linears: Iterable[tuple[AdaptedLinear, int]], tokens: int, dtype: str) -> Added:
    """All that adapters add to the forward and backward passes of `linears`, (linear, how often it runs forward)."""
    known: dict[tuple[AdaptedLinear, int], Added] = {}
    total = Added()
    for one in linears:
        if one not in known:
            known[one] = _added(machine, *one, tokens, dtype)
        total = Added(total.seconds + known[one].seconds, total.starts + known[one].starts)
    return total


def _added(machine: Machine, linear: AdaptedLinear, forwards: int, tokens: int, dtype: str) -> Added:
    width, inputs, outputs = BYTES[dtype], linear.in_features, linear.out_features
    ranks = sum(rank for _, rank in linear.pieces)

    def product(m: int, n: int, k: int, layout: Layout, *, added: bool = False) -> float:
        """`added`: to numbers that are there, which are read, too."""
        num_bytes = width * (m * n * (2 if added else 1) + m * k + n * k)
        return matmul_seconds(machine, (m, n, k), layout, num_bytes, dtype)

    # The seconds of each operation.
    forward = [product(tokens, ranks, inputs, "forward")]
    backward = [*forward, product(ranks, inputs, tokens, "weight_gradient")]
    backward.append(product(tokens, inputs, ranks, "input_gradient", added=True))
    for rows, rank in linear.pieces:
        forward.append(product(tokens, rows, rank, "forward", added=True))
        backward += [product(tokens, rank, rows, "input_gradient"), product(rows, rank, tokens, "weight_gradient")]
        for size in (rank * inputs, rows * rank) if width < 4 else ():  # float32 factors are cast, their gradients back
            cast = _passed(machine, (4 + width) * size)
            forward.append(cast)
            backward.append(cast)
    if len(linear.pieces) > 1:
        joined = _passed(machine, 2 * width * ranks * inputs)
        forward.append(joined)
        backward.append(joined)
    if linear.gated:
        backward.append(_kernel(machine, "swiglu", width * 3 * tokens * inputs, dtype))
    if linear.stretched:
        forward.append(product(outputs, ranks, inputs, "forward"))  # of the weight with A, for the lengths
        for rows, rank in linear.pieces:
            forward += [_passed(machine, 8 * rows * rank)] * LENGTH_OPS
        forward.append(_passed(machine, 2 * width * tokens * outputs))
        backward.append(_passed(machine, 3 * width * tokens * outputs))
    return Added(forwards * sum(forward) + sum(backward), forwards * len(forward) + len(backward))


def code_width(dims: ModelDims, trained: ModelDims, frozen_bytes: float, dtype: str) -> float:
    """Bytes of a frozen weight of the layers' linears, of which `frozen_bytes` hold all together with the dense weights."""
    coded = sum(_frozen(dims, trained))
    dense = dims.num_params - trained.num_params - coded
    return max(frozen_bytes - BYTES[dtype] * dense, 0.0) / max(coded, 1)


def coded_bytes(dims: ModelDims, trained: ModelDims, code_width: float, dtype: str) -> float:
    """Bytes of all frozen weights where those of the layers' linears are codes of `code_width` bytes: `code_width` of them is that."""
    coded = sum(_frozen(dims, trained))
    return code_width * coded + BYTES[dtype] * (dims.num_params - trained.num_params - coded)


def added_by_decoding(
    machine: Machine, dims: ModelDims, trained: ModelDims, code_width: float, passes: Sequence[int], dtype: str
) -> Added:
    """What it adds that the layers' frozen weights, codes of `code_width` bytes each, become matrices, those of layer i `passes[i]` times.

    A GPU's kernel reads codes and writes weights; on a CPU torch goes over them several times.
    """
    each = code_width + BYTES[dtype] if machine.device.startswith("cuda") else DEQUANTIZE_BYTES
    decoded = sum(count * times for count, times in zip(_frozen(dims, trained), passes, strict=True))
    starts = sum(
        (len(one.matmuls) - len(own.matmuls)) * times
        for one, own, times in zip(dims.layers, trained.layers, passes, strict=False)
    )
    largest = max((rows * columns for layer in dims.layers for rows, columns in layer.matmuls), default=1)
    return Added(seconds(machine, num_bytes=each * decoded, op_bytes=each * largest, dtype=dtype).value, starts)


def _frozen(dims: ModelDims, trained: ModelDims) -> list[float]:
    """Weights of each of the layers of `dims`, which may be the first ones alone, that are not trained: of experts all."""
    return [
        one.matmul_params + (1 - one.routed.share) * one.routed.params - own.matmul_params
        for one, own in zip(dims.layers, trained.layers, strict=False)
    ]


def _passed(machine: Machine, num_bytes: float) -> float:
    """Seconds of an operation that moves so many bytes; small ones take as long as one of SMALL."""
    calibration = machine.calibration
    if calibration is None:
        return seconds(machine, num_bytes=num_bytes).value
    size = max(num_bytes, SMALL)
    return size / copy_rate(calibration, size)


def _kernel(machine: Machine, kernel: str, num_bytes: float, dtype: str) -> float:
    rate = kernel_rate(machine, kernel, dtype, num_bytes)
    return seconds(machine, num_bytes=num_bytes, dtype=dtype).value if rate is None else num_bytes / rate
