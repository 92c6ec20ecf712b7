"""Tilings of the matrix-product kernels: tiles, stages and parts of K from the problem's size alone.

Pure functions; the numbers in them were measured on an H200 (benchmarks/kernels/linear.py).
"""

from __future__ import annotations

from typing import NamedTuple


class SkinnyShape(NamedTuple):
    """Tile and pipeline of `triton.skinny`: weight rows, x rows and columns of a tile, warps, stages, parts of K.

    `early`: a block may start before the previous kernel has ended, to prefetch its weights.
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
    block_m = max(16, power_of_2(rows))
    wide, narrow = -(-out_features // 128), -(-out_features // 64)
    if wide >= 96:
        return SkinnyShape(128, block_m, 128, 8, 4, 1, early=True)
    parts = _parts(narrow, -(-in_features // 128), 128)
    return SkinnyShape(64, block_m, 128, 4, 4 if parts == 1 else 5, parts, early=True)


def slotted_shape(rows: int, out_features: int, in_features: int) -> SkinnyShape:
    """The same where the factors of adapters are added (`hone.ops.slotted_linear`): narrow tiles alone, of which two fit on an SM."""
    shape = skinny_shape(rows, out_features, in_features)
    return SkinnyShape(64, shape.block_m, 128, 4, 4 if shape.parts == 1 else 5, shape.parts, early=True)


class QuantizedShape(NamedTuple):
    """Tile and pipeline of `gluon.w4`: x rows, 64-column chunks a stage, stages, 64-row tiles, parts of K, blocks an SM.

    `early`: a block may start before the previous kernel has ended, and loads its first codes and scales meanwhile.
    `soon`: the next kernel may start as soon as all blocks of this one have started, not only after their last load.
    `fold`: a group's scale multiplies the group's sum, not the weights.
    """

    block_m: int
    chunks: int
    stages: int
    tiles: int
    parts: int
    blocks: int
    early: bool
    fold: bool
    soon: bool = False


def quantized_shape(rows: int, out_features: int, in_features: int, bits: int, group_size: int) -> QuantizedShape:
    """For any number of `rows` of x; `group_size` 0 is one scale a row."""
    block_m = min(256, max(8, power_of_2(rows)))
    columns, steps = -(-rows // block_m), in_features // 128
    if block_m >= 128:  # compute-bound: large tiles, one block per SM
        stages = {(128, 4): 5, (128, 8): 4, (256, 4): 3, (256, 8): 2}[block_m, bits]
        parts = _parts(-(-out_features // 128) * columns, steps, 100)
        return QuantizedShape(block_m, 2, stages, 2, parts, 1, early=True, fold=False)
    parts = _parts(-(-out_features // 64) * columns, steps, 224)
    # A sum of unscaled codes is scaled once per group instead of every weight. Scaled weights use stages of two chunks:
    # ptxas overlaps products with other work only where two sets of registers alternate.
    if group_size < 64:
        return QuantizedShape(block_m, 2, 3 if block_m == 64 else 6, 1, parts, 2, early=True, fold=False)
    if block_m == 64:
        chunks, stages = (4, 2) if bits == 4 else (2, 3)
        return QuantizedShape(block_m, chunks, stages, 1, parts, 2, early=True, fold=True)
    stages = 3 if (bits, block_m) in ((4, 16), (8, 32)) else 4
    return QuantizedShape(block_m, 4, stages, 1, parts, 2, early=True, fold=True, soon=parts == 1)


def _parts(tiles: int, steps: int, wanted: int) -> int:
    """Number of parts of the `steps` of K, so that `tiles` times parts is about `wanted` blocks or more."""
    return max(1, min(-(-wanted // tiles), steps // 8, 16))


def gated_fill(rows: int, features: int, num_sms: int) -> float:
    """The part of `gluon.gated`'s work that is wanted: its tiles have 128 rows and features, and `num_sms` of them run at a time."""
    tiles = -(-rows // 128) * -(-features // 128)
    return rows * features / (-(-tiles // num_sms) * num_sms * 128 * 128) if tiles else 0.0


def gated_pays(rows: int, features: int, in_features: int, num_sms: int) -> bool:
    """Whether one kernel for a product and its gate is faster than the library's product and then the gate.

    What it saves is a pass over the product, which weighs more the shorter the sums are: 0.95 of the tiles must be wanted with
    sums of 4096, 0.82 with 1024 (an H200; with 8192 rows it then takes 0.96 and 0.88 of the time).
    """
    return gated_fill(rows, features, num_sms) >= in_features / (in_features + 220)


def power_of_2(number: int) -> int:
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
    block_m = min(64, max(16, power_of_2(rows)))
    tiles = -(-out_features // 64) * -(-rows // block_m)
    return Fp8Shape(64, block_m, 4, 6, _parts(tiles, -(-in_features // 128), 224))


class SparseShape(NamedTuple):
    """Tile and pipeline of `gluon.sparse`: weight rows and x rows of a tile, stages of 256 columns, parts of K, blocks an SM."""

    block_n: int
    block_m: int
    stages: int
    parts: int
    blocks: int


def sparse_shape(rows: int, out_features: int, in_features: int) -> SparseShape:
    """For `rows` (1 ... 64) rows of x."""
    block_m = min(64, max(8, power_of_2(rows)))
    block_n, stages, blocks, wanted = {32: (64, 3, 2, 224), 64: (128, 3, 1, 112)}.get(block_m, (64, 4, 2, 224))
    return SparseShape(
        block_n, block_m, stages, _parts(-(-out_features // block_n), in_features // 128, wanted), blocks
    )
