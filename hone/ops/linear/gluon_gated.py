"""The first product of a SwiGLU feed-forward with its gate, on Hopper: one warp loads by TMA, two warpgroups multiply (Gluon).

A tile of the product holds equally many columns of the gate and of what it gates, so that the tile alone has all that the gate
needs: the product, twice as wide as the output, never goes to memory. A persistent kernel, as
`hone.ops.moe.gluon_grouped`: while a tile is written, in the background by TMA, the next one is multiplied.

Legend: T rows, F features of the output, R features that are summed over.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from hone.ops.compat import tma_load, tma_store, warpgroup_barrier
from hone.ops.descriptors import boxes
from hone.ops.dispatch import locate
from hone.ops.moe.gluon_grouped import MAX_REGISTERS, REGISTERS, Buffers, barriers, multiply, place

WIDTH, STEP, STAGES = 128, 64, 4
"""Output features of a tile, how much of the sum a stage holds, and stages: 224 KiB of shared memory."""

SPAN = 16
"""Tiles of rows that run beside each other through all features, so that both operands stay in the L2 cache."""


@gluon.jit
def _load(x_desc, w_desc, mem, num_rows, num_features, steps, F, SPAN: gl.constexpr):
    """The loading warp: rows of x, and rows of the weight that make the gate and what it gates."""
    BK: gl.constexpr = mem.a.shape[2]
    HALF: gl.constexpr = w_desc.block_type.shape[0]
    BYTES: gl.constexpr = 2 * x_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes
    halves = mem.b._reinterpret(w_desc.dtype, [2 * mem.STAGES, HALF, BK], w_desc.layout)
    done = 0
    for t in range(gl.program_id(0), num_rows * num_features, gl.num_programs(0)):
        m, n = place(t, num_rows, num_features, SPAN)
        for k in range(steps):
            slot = done % mem.STAGES
            bar = mem.full.index(slot)
            mbarrier.wait(mem.empty.index(slot), ((done // mem.STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            tma_load(x_desc, [m * 128, k * BK], bar, mem.a.index(2 * slot))
            tma_load(x_desc, [m * 128 + 64, k * BK], bar, mem.a.index(2 * slot + 1))
            tma_load(w_desc, [n * HALF, k * BK], bar, halves.index(2 * slot))
            tma_load(w_desc, [F + n * HALF, k * BK], bar, halves.index(2 * slot + 1))
            done += 1


@gluon.jit
def _sum(out_desc, mem, num_rows, num_features, steps, PART: gl.constexpr, SPAN: gl.constexpr):
    """A multiplying warpgroup: 64 rows of every tile, then their gate."""
    BN: gl.constexpr = mem.b.shape[1]
    DTYPE: gl.constexpr = mem.out.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    done = 0
    for t in range(gl.program_id(0), num_rows * num_features, gl.num_programs(0)):
        m, n = place(t, num_rows, num_features, SPAN)
        acc = gl.zeros([64, BN], gl.float32, layout)
        for k in range(steps):
            slot = done % mem.STAGES
            mbarrier.wait(mem.full.index(slot), (done // mem.STAGES) & 1)
            acc = multiply(acc, mem, slot, PART, False, False, k > 0)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(mem.empty.index((done - 1) % mem.STAGES), pred=k > 0)
            done += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(mem.empty.index((done - 1) % mem.STAGES))
        gate, up = gl.split(acc.reshape([64, 2, BN // 2]).permute((0, 2, 1)))
        # Rounded as a product and a gate of their own would be.
        gate = gl.convert_layout(gate, half, assert_trivial=True).to(DTYPE).to(gl.float32)
        up = gl.convert_layout(up, half, assert_trivial=True).to(DTYPE).to(gl.float32)
        active = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
        staged = mem.out.index(PART)
        tma.store_wait(0)
        warpgroup_barrier()
        staged.store((active * up).to(DTYPE))
        fence_async_shared()
        warpgroup_barrier()
        tma_store(out_desc, [m * 128 + 64 * PART, n * (BN // 2)], staged)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_features", "steps"])
def gated_product(
    x_desc, w_desc, out_desc, num_rows, num_features, steps, F,
    STAGES: gl.constexpr, SPAN: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """out [T, F] = silu(x w_gate^T) * (x w_up^T) for x [T, R] and w [2F, R], the gate's rows first.

    `num_rows` and `num_features` are numbers of tiles. Rows and features beyond the ends are read as 0 and not stored; rows
    between F and the end of its last tile are computed for nothing.
    """
    BK: gl.constexpr = x_desc.block_type.shape[1]
    HALF: gl.constexpr = out_desc.block_type.shape[1]
    mem = Buffers(
        gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, 64, BK], x_desc.layout),
        gl.allocate_shared_memory(x_desc.dtype, [STAGES, 2 * HALF, BK], x_desc.layout),
        gl.allocate_shared_memory(out_desc.dtype, [2, 64, HALF], out_desc.layout),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_sum, (out_desc, mem, num_rows, num_features, steps, 0, SPAN)),
            (_sum, (out_desc, mem, num_rows, num_features, steps, 1, SPAN)),
            (_load, (x_desc, w_desc, mem, num_rows, num_features, steps, F, SPAN)),
        ],
        [4, 1],
        [REGS, 24],
    )


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x w_gate^T) * (x w_up^T): x [T, R], weight [2F, R] with the gate's rows first, [T, F] in x's dtype.

    Rows of both are contiguous and their starts 16-byte aligned, F is a multiple of 8.
    """
    rows, summed = x.shape
    features = len(weight) // 2
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, 128), triton.cdiv(features, WIDTH)
    gated_product[(min(locate(x.device).num_sms, tiles[0] * tiles[1]),)](
        boxes(x, 64, STEP), boxes(weight, WIDTH, STEP), boxes(out, 64, WIDTH), *tiles, triton.cdiv(summed, STEP), features,
        STAGES=STAGES, SPAN=SPAN, REGS=REGISTERS, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
