"""Linear layers: dense, 4-bit, 8-bit, fp8 and 2:4 sparse weights against torch's bf16 product (cuBLAS).

Every call meets another copy of the weight, eight in turn (240 MB at least): nothing comes from the L2 cache. Bytes are
those of the weight and its scales, x and the output. The GEMM's FLOP/s, not the memory, bounds 256 rows. Marlin and
Machete are not carried here: their wheels need a build of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import formats, fp8_linear, linear, quantized_linear, sparse_linear
from hone.ops.linear.api import fp8_codes
from hone.ops.linear.sparse import compress_24

COPIES = 8
SIZES = ((14336, 4096), (4096, 14336))
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
W4_TARGETS = {1: 3.0, 16: 2.8, 64: 1.8, 256: 0.9}


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    found = []
    with torch.no_grad():
        for features, columns in SIZES:
            dense = [torch.randn(features, columns, **BF16) for _ in range(COPIES)]
            for count in (1, 4, 16, 64):
                found.append(linear_row(limit, dense, count))
            for bits in (4, 8):
                found += quantized_rows(limit, dense, bits)
            found += fp8_rows(limit, dense)
            found += sparse_rows(limit, dense)
            del dense
            torch.cuda.empty_cache()
    return found


def linear_row(limit: Ceilings, dense: list[Tensor], count: int) -> dict[str, Any]:
    """bf16 against cuBLAS."""
    features, columns = dense[0].shape
    x = torch.randn(count, columns, **BF16)
    ours, theirs = _timed(lambda i: linear(x, dense[i], backend="triton"), lambda i: F.linear(x, dense[i]))
    return row(
        f"linear bf16 M {count}, {features} x {columns}",
        ours,
        amount=_bytes(dense[0], x) + 2 * count * features,
        unit="TB/s",
        ceiling=limit.read,
        peer="cuBLAS",
        peer_seconds=theirs,
        of_target=0.95 if count <= 16 else None,
    )


def quantized_rows(limit: Ceilings, dense: list[Tensor], bits: int) -> list[dict[str, Any]]:
    """Groups of 128 columns, bf16 scales, against the bf16 product."""
    features, columns = dense[0].shape
    low, high = formats.code_range(bits)
    tiles = []
    for _ in range(COPIES):
        codes = torch.randint(low, high + 1, (features, columns), dtype=torch.int8, device="cuda")
        scales = torch.rand(features, columns // 128, **BF16) * 0.01
        tiles.append((formats.tile_codes(codes, bits), formats.tile_scales(scales)))
    found = []
    for count in (1, 16, 64, 256):
        x = torch.randn(count, columns, **BF16)
        ours, theirs = _timed(
            lambda i, x=x: quantized_linear(x, *tiles[i], bits=bits, out_features=features),
            lambda i, x=x: F.linear(x, dense[i]),
        )
        moved = _bytes(*tiles[0], x) + 2 * count * features
        bound = min(limit.read / moved, limit.gemm / (2 * count * features * columns))  # calls a second
        found.append(
            row(
                f"linear W{bits}A16 g128 M {count}, {features} x {columns}",
                ours,
                amount=moved,
                unit="TB/s",
                ceiling=bound * moved,
                peer="cuBLAS bf16",
                peer_seconds=theirs,
                target=W4_TARGETS[count] if bits == 4 else None,
            )
        )
    return found


def fp8_rows(limit: Ceilings, dense: list[Tensor]) -> list[dict[str, Any]]:
    """One scale per row against torch's scaled product, one per block against the bf16 product."""
    found = []
    for blockwise in (False, True):
        weight, scales = fp8_codes(dense[0], "128x128" if blockwise else "row")
        weights = [weight.clone() for _ in range(COPIES)]
        found += [fp8_row(limit, dense, weights, scales, count) for count in (16, 64)]
    return found


def fp8_row(limit: Ceilings, dense: list[Tensor], weights: list[Tensor], scales: Tensor, count: int) -> dict[str, Any]:
    """One number of rows; `scales` belong to every copy."""
    features, columns = dense[0].shape
    blockwise = scales.dim() == 2
    wide = torch.randn(count, columns, **BF16)
    x, x_scales = fp8_codes(wide, "1x128" if blockwise else "row")

    def scaled(backend: str) -> Callable[[int], Tensor]:
        return lambda i: fp8_linear(x, x_scales, weights[i], scales, backend=backend)

    peer = (lambda i: F.linear(wide, dense[i])) if blockwise else scaled("torch")
    ours, theirs = _timed(scaled("triton"), peer)
    return row(
        f"linear fp8 {'128 blocks' if blockwise else 'row-wise'} M {count}, {features} x {columns}",
        ours,
        amount=_bytes(weights[0], scales, x, x_scales) + 2 * count * features,
        unit="TB/s",
        ceiling=limit.read,
        peer="cuBLAS bf16" if blockwise else "torch._scaled_mm",
        peer_seconds=theirs,
    )


def sparse_rows(limit: Ceilings, dense: list[Tensor]) -> list[dict[str, Any]]:
    """Two of four weights kept, in torch's format, against the dense product: 16 rows are memory-bound, 2048 compute-bound."""
    features, columns = dense[0].shape
    packed = []
    for weight in dense:
        fours = weight.view(features, -1, 4)
        kept = fours.abs().topk(2, -1).indices
        packed.append(compress_24(torch.zeros_like(fours).scatter(-1, kept, fours.gather(-1, kept)).view_as(weight)))
    found = []
    for count in (16, 2048):
        x = torch.randn(count, columns, **BF16)
        ours, theirs = _timed(lambda i, x=x: sparse_linear(x, packed[i]), lambda i, x=x: F.linear(x, dense[i]))
        moved = features * columns * 9 // 8 + _bytes(x) + 2 * count * features  # half the weights, 2 bits a kept one
        bound = min(limit.read / moved, limit.gemm / (count * features * columns))
        found.append(
            row(
                f"linear 2:4 M {count}, {features} x {columns}",
                ours,
                amount=moved,
                unit="TB/s",
                ceiling=bound * moved,
                peer="cuBLAS bf16",
                peer_seconds=theirs,
            )
        )
    return found


def _timed(ours: Callable[[int], Tensor], theirs: Callable[[int], Tensor]) -> list[float]:
    """Seconds per call of both, over all copies of the weight."""
    runs = [lambda call=call: [call(i) for i in range(COPIES)] for call in (ours, theirs)]
    return interleaved(runs, calls=COPIES, min_time_s=0.05)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
