"""The work of a sweep over the columns of a matrix, which GPTQ and SparseGPT make (`hone.solvers.sweep`)."""

from __future__ import annotations

from dataclasses import replace

from hone.cost.work import Work

SWEEP_BYTES = 300.0
"""Bytes a weight of a sweep over columns (`hone.solvers.sweep`), at the rate of a large copy."""
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
    blocks, none = columns / 64, (0.0, 0)
    masks, choices, gpu_masks = (BLOCK_MASK, blocks, GPU_MASK) if sparsity else (none, 0.0, none)
    if sparsity and group:
        masks, choices, gpu_masks = (GROUP_MASK[0] * group, GROUP_MASK[1]), columns / group, none
    assert before.on_gpu is not None
    on_cpu, on_gpu = (
        replace(
            one,
            flops=columns**3 / 3 + sweeps * rows * columns**2,
            squares=FACTOR_SQUARES,
            num_bytes=one.num_bytes + sweeps * (SWEEP_BYTES + chosen[0]) * rows * columns,
            num_ops=one.num_ops + sweeps * (ops + chosen[1] * count),
        )
        for one, ops, chosen, count in (
            (before, COLUMN_OPS * columns, masks, choices),
            (before.on_gpu, BLOCK_LAUNCHES * blocks, gpu_masks, blocks),
        )
    )
    return replace(on_cpu, on_gpu=replace(on_gpu, temporaries=SWEEP_TENSORS))
