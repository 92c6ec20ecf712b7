"""How the matrix-product kernels are cut: tiles, stages and parts of K from the problem's size alone.

Pure functions; the numbers in them were measured on an H200 (benchmarks/kernels/gemm.py).
"""

from __future__ import annotations

from typing import NamedTuple


class SkinnyShape(NamedTuple):
    """Tile and pipeline of `triton.skinny`: weight rows, x rows and columns of a tile, warps, stages, parts of K.

    `early`: a block may start before the kernel in front has ended, to ask for its weights.
    """

    block_n: int
    block_m: int
    block_k: int
    warps: int
    stages: int
    parts: int
    early: bool


def skinny_shape(rows: int, out_features: int, in_features: int) -> SkinnyShape:
    """For `rows` (1 ... 64) rows of x."""
    block_m = max(16, _power(rows))
    parts = _parts(-(-out_features // 64), -(-in_features // 128), 128)
    return SkinnyShape(64, block_m, 128, 4, 4, parts, early=parts > 1)


class QuantizedShape(NamedTuple):
    """Tile and pipeline of `gluon.w4`: x rows, 64-column chunks a stage, stages, 64-row tiles, parts of K, blocks an SM.

    `early`: a block may start before the kernel in front has ended, and loads its first codes and scales meanwhile.
    `fold`: a group's scale multiplies the group's sum, not the weights. `teams`: 2 lets two sets of warps take turns at
    the stages and adds their sums at the end.
    """

    block_m: int
    chunks: int
    stages: int
    tiles: int
    parts: int
    blocks: int
    early: bool
    fold: bool
    teams: int = 1


class FewShape(NamedTuple):
    """Cut of `gluon.w4_few`: warps that share out K, 16-row tiles, 64-column chunks a unit, units under way, blocks an SM.

    `soon`: the next kernel's blocks may take places as soon as this one's have all begun, not when their sums are done.
    """

    splits: int
    rows: int
    chunks: int
    depth: int
    blocks: int
    soon: bool = False


def few_shape(rows: int, out_features: int, in_features: int, bits: int, group_size: int) -> FewShape | None:
    """None where `gluon.w4` is the kernel; `group_size` 0 is one scale a row."""
    if rows > 4 or bits != 4 or 0 < group_size < 64:
        return None
    chunks = 1 if group_size == 64 else 2
    if in_features > 8192:
        return FewShape(16, 1, chunks, 2, 2)
    return FewShape(8, 1, chunks, 2, 3)


def quantized_shape(rows: int, out_features: int, in_features: int, bits: int, group_size: int) -> QuantizedShape:
    """For any number of `rows` of x; `group_size` 0 is one scale a row."""
    block_m = min(128, max(8, _power(rows)))
    blocks = -(-out_features // 64) * -(-rows // block_m)
    parts = _parts(blocks, in_features // 128, 224)
    # A sum of bare codes is scaled once a group, where weights would be scaled one by one. Without that a stage has two
    # chunks: ptxas overlaps products with other work only where two sets of registers take turns.
    fold = group_size >= 64 and block_m <= 64
    if fold and block_m <= 32:
        chunks, stages = 4, 4 if bits == 4 or block_m <= 16 else 3
    elif fold and bits == 4:
        chunks, stages = 4, 2
    else:
        chunks, stages = 2, {8: 6, 16: 6, 32: 6, 64: 3, 128: 2}[block_m]
    return QuantizedShape(block_m, chunks, stages, 1, parts, 2, early=True, fold=fold)


def _parts(tiles: int, steps: int, wanted: int) -> int:
    """Into how many parts to cut `steps` of K so that `tiles` times parts is about `wanted` blocks or more."""
    return max(1, min(-(-wanted // tiles), steps // 8, 16))


def _power(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


class Fp8Shape(NamedTuple):
    """Tile and pipeline of `triton.fp8`: weight rows and x rows of a tile, warps, stages, parts of K."""

    block_n: int
    block_m: int
    warps: int
    stages: int
    parts: int


def fp8_shape(rows: int, out_features: int, in_features: int, *, blockwise: bool) -> Fp8Shape:
    """For any number of `rows` of x."""
    block_m = min(64, max(16, _power(rows)))
    tiles = -(-out_features // 64) * -(-rows // block_m)
    return Fp8Shape(64, block_m, 4, 4, _parts(tiles, -(-in_features // 128), 128))
