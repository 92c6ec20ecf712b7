"""fp8 products and casts in blocks of 128 on one GPU: agreement with float64 in poisoned memory, and one table beside rows and bf16.

Called by `python -m benchmarks.train_fp8 --parts kernels`, which needs compute capability 8.9 or later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hone.ops.dispatch import choose, locate
from hone.ops.fp8 import blocks, factors, triton_blocks
from hone.ops.fp8.recipes import RECIPES, Recipe

E4M3 = torch.float8_e4m3fn
BLOCKS, ROWS = RECIPES["blockwise"], RECIPES["rowwise"]
SHAPES = ((8192, 6144, 4096), (8192, 28672, 4096), (8192, 4096, 14336))
"""(tokens, output, input) of linears of Llama-3 8B."""
NAMES = ("y", "dx", "dW")
RAGGED = ((16, 16, 16), (144, 208, 272), (1040, 1296, 4112), (1024, 2048, 1536))


def poison() -> None:
    """Leaves freed memory full of not-a-numbers: what the next outputs leave unwritten shows."""
    held = [
        torch.full((1 << size,), 0xFF, dtype=torch.uint8, device="cuda")
        for size in (10, 14, 18, 21, 24)
        for _ in range(4)
    ]
    del held


def backends(dtype: torch.dtype, columns: int, width: int, square: bool) -> list[str]:
    """The kernels that this GPU has for such a product: Triton's, and cuBLAS's where it is the chosen one."""
    case: dict[str, Any] = {"dtype": dtype, "columns": columns, "width": width, "square": square}
    chosen = choose("fp8_block_product", locate("cuda"), **case, library=factors.has_block_products()).backend
    return [*(["cublas"] if chosen == "cublas" else []), "triton"]


def factors_of(m: int, n: int, k: int, draw: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """x [m, k], weight [n, k] and the gradient [m, n]."""
    return draw(m, k, torch.bfloat16, 1), draw(n, k, torch.bfloat16, 2), draw(m, n, torch.bfloat16, 3)


def coded(x: Tensor, weight: Tensor, up: Tensor, how: Any) -> list[tuple[Tensor, ...]]:
    """The codes and scales of the three products' factors."""

    def cast(one: Tensor, *, weight: bool = False) -> Any:
        return factors.cast(one, how, E4M3, factors.maxima(one, how), rows=True, columns=True, weight=weight)

    a, b, c = cast(x), cast(weight, weight=True), cast(up)
    return [(*a[:2], *b[:2]), (*c[:2], *b[2:]), (*c[2:], *a[2:])]


def check(say: Callable[[str], None], draw: Callable[..., Tensor]) -> int:
    """How many disagree: casts bit for bit with the reference, products with the reference in float64, all tiles with each other."""
    failed = 0
    for m, n, k in RAGGED:
        given = factors_of(m, n, k, draw)
        for one in given:
            for square in (False, True):
                poison()
                made = triton_blocks.cast(one, E4M3, square=square, rows=True, columns=True)
                for turned in (False, True):
                    codes, scales = blocks.block_codes(one.cpu(), E4M3, square=square, columns=turned)
                    same = torch.equal(made[2 * turned].cpu().view(torch.uint8), codes.view(torch.uint8))
                    same &= torch.equal(made[2 * turned + 1].cpu(), scales)
                    failed += not same
                    if not same:
                        say(f"DIFFERENT CODES: {tuple(one.shape)} square {square} transposed {turned}")
        worst: dict[str, float] = {}
        for which, parts in enumerate(coded(*given, BLOCKS)):
            square = which < 2
            exact = blocks.block_product(*parts, None, torch.float64, square=square, sums=torch.float64)
            size = exact.norm(dim=1).clamp_min(1e-300)
            for dtype in (torch.float32, torch.bfloat16):
                for backend in backends(dtype, len(parts[2]), parts[0].shape[1], square):
                    poison()
                    found = factors.product(*parts, None, dtype, BLOCKS, which, backend)
                    away = ((found.double() - exact).norm(dim=1) / size).max().item()
                    label = f"{NAMES[which]} {backend} {'f32' if dtype == torch.float32 else 'bf16'}"
                    worst[label] = away
                    # Sums of 128 have about 14 bits in the tensor cores; bf16 rounds to 8.
                    failed += not away < (1e-2 if dtype == torch.float32 else 2e-2)
            tiles = [
                triton_blocks.product(*parts, None, torch.float32, square=square, tile=one)
                for one in triton_blocks.TILES
            ]
            failed += not all(torch.equal(tiles[0], one) for one in tiles[1:])
        say(f"  blocks {m} x {n} x {k}: error of the worst row, " + ", ".join(f"{a} {e:.0e}" for a, e in worst.items()))
    return failed


def both_ways(x: Tensor, how: Recipe) -> Any:
    """A whole cast, with what it needs before."""
    return factors.cast(x, how, E4M3, factors.maxima(x, how), rows=True, columns=True)


def table(
    say: Callable[[str], None],
    seconds: Callable[..., float],
    peaks: tuple[float, float, float],
    draw: Callable[..., Tensor],
) -> None:
    """Times of products and of casts: bf16, rows by torch._scaled_mm, blocks by each kernel."""
    bf16, fp8, bandwidth = peaks
    say(
        "\n| linear, product | bf16 | rows, torch._scaled_mm | blocks, cuBLAS | blocks, Triton | chosen |\n|---|---|---|---|---|---|"
    )
    for m, n, k in SHAPES:
        x, weight, up = factors_of(m, n, k, draw)
        plain = ((x, weight.t()), (up, weight), (up.t(), x))
        by_row, by_block = coded(x, weight, up, ROWS), coded(x, weight, up, BLOCKS)
        for which, name in enumerate(NAMES):
            flop, dtype, parts = 2.0 * m * n * k, torch.bfloat16, by_block[which]
            here = backends(dtype, len(parts[2]), parts[0].shape[1], which < 2)
            took = {"bf16": seconds(partial(torch.mm, *plain[which]))}
            took["rows"] = seconds(partial(factors.product, *by_row[which], None, dtype, ROWS, which))
            for one in here:
                took[one] = seconds(partial(factors.product, *parts, None, dtype, BLOCKS, which, one))
            cells = [
                f"{took[one] * 1e6:.0f} us, {flop / took[one] / 1e12:.0f} TF, {flop / took[one] / (bf16 if one == 'bf16' else fp8):.0%}"
                if one in took
                else "-"
                for one in ("bf16", "rows", "cublas", "triton")
            ]
            say(f"| {m} x {n} x {k}, {name} | {' | '.join(cells)} | {here[0]} |")
    say("\n| cast | rows, both ways | blocks, both ways | share of the bandwidth |\n|---|---|---|---|")
    for rows, width in ((8192, 4096), (8192, 14336), (28672, 4096)):
        x = draw(rows, width, torch.bfloat16, 4)
        took = {}
        for how in (ROWS, BLOCKS):
            took[how.blockwise] = seconds(partial(both_ways, x, how))
        share = rows * width * 4.0 / took[True] / bandwidth
        say(f"| {rows} x {width} | {took[False] * 1e6:.0f} us | {took[True] * 1e6:.0f} us | {share:.0%} |")
    x, weight, up = factors_of(*SHAPES[0], draw)
    for which, parts in enumerate(coded(x, weight, up, BLOCKS)):
        each = [
            f"{tuple(one)} {seconds(partial(triton_blocks.product, *parts, None, torch.bfloat16, square=which < 2, tile=one)) * 1e6:.0f} us"
            for one in triton_blocks.TILES
        ]
        say(f"  Triton's tiles (rows, columns, warps, stages), {NAMES[which]}: {', '.join(each)}")
