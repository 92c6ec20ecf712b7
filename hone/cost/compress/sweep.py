"""The work of a sweep over the columns of a matrix, which GPTQ and SparseGPT make (`hone.solvers.sweep`)."""

from __future__ import annotations

from dataclasses import replace

from hone.cost.work import Work

SWEEP_BYTES, SWEEP_GPU_BYTES = 300.0, 150.0
"""Bytes a weight of a sweep over columns (`hone.solvers.sweep`), at the rate of a large copy: of columns one by one, and of 64 in a
kernel's registers (H200: 40 to 80 us for 64 columns of 4,096 to 28,672 rows), with the copies into the order and back."""
FACTOR_BYTES = 60.0
"""On a GPU, bytes a number of the sum [K, K] that is put in order, damped, turned over twice, looked through, and divided by its diagonal."""
BLOCK = 64
"""Columns that a GPU rounds in one launch; a product adds the errors of all columns before them."""
COLUMN_OPS, BLOCK_LAUNCHES = 17, 12
"""Its operation starts: of a column without a GPU, five operations and the slices between; of 64 columns on one."""
FACTOR_SQUARES = 4.75
"""The sum in another order, with its damping, and its Cholesky factor, which is looked through for values that are not finite."""
SWEEP_TENSORS = 4.5
"""Float32 tensors [N, K] of a GPU's sweep: the weight, its columns in order, their scales, two sets of codes."""
BLOCK_MASK, GROUP_MASK, GPU_MASK = (800.0, 100), (100.0, 170), (100.0, 25)
"""Bytes a weight and operation starts of choosing masks: of 64 columns, of each column of a pattern's group (one Xeon core: 50
and 44 ns a weight), and of 64 columns on a GPU, counted, not measured; there a pattern's are chosen in the sweep's kernel."""


def sweep_work(rows: int, columns: int, before: Work, sparsity: float, group: int, sweeps: int = 1) -> Work:
    """`before`, one Cholesky factor, and each sweep: half a product, the loop, and masks of `group` columns (0: of blocks)."""
    blocks, none = columns / BLOCK, (0.0, 0)
    masks, choices, gpu_masks = (BLOCK_MASK, blocks, GPU_MASK) if sparsity else (none, 0.0, none)
    if sparsity and group:
        masks, choices, gpu_masks = (GROUP_MASK[0] * group, GROUP_MASK[1]), columns / group, none
    assert before.on_gpu is not None
    on_cpu, on_gpu = (
        replace(
            one,
            factored=columns,
            squares=FACTOR_SQUARES,
            num_bytes=one.num_bytes + sweeps * (swept + chosen[0]) * rows * columns,
            num_ops=one.num_ops + sweeps * (ops + chosen[1] * count),
        )
        for one, swept, ops, chosen, count in (
            (before, SWEEP_BYTES, COLUMN_OPS * columns, masks, choices),
            (before.on_gpu, SWEEP_GPU_BYTES, BLOCK_LAUNCHES * blocks, gpu_masks, blocks),
        )
    )
    by_blocks = (sweeps * columns / BLOCK, BLOCK, rows, columns // 2)
    moved = on_gpu.num_bytes + FACTOR_BYTES * columns**2
    on_gpu = replace(on_gpu, num_bytes=moved, temporaries=SWEEP_TENSORS, products=(by_blocks,))
    return replace(on_cpu, flops=float(sweeps * rows * columns**2), on_gpu=on_gpu)
