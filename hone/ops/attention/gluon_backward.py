"""The attention backward on Hopper: a pass of row sums, the main kernel, and a pass that rounds dq.

dq is summed over tiles of keys by atomic additions in no fixed order, so dq is not bit-reproducible; dk and dv are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hone.base.errors import SpecError
from hone.ops.attention.gluon_gradients import flash_backward
from hone.ops.attention.gluon_passes import finish, prepare
from hone.ops.attention.gluon_ranges import queries_of
from hone.ops.attention.masks import Tiles, outer_strides
from hone.ops.descriptors import boxes

BLOCK_N = 128
"""Keys a tile: 64 in each of the two softmax warpgroups."""

_OTHERS = "leave `backend` out, or give 'triton', which takes heads up to 256 and blocks from 16"

_SHARE = 16
"""A tile of keys is long, and is started early, if it takes more than 1 / _SHARE of a multiprocessor's work."""


@dataclass(frozen=True)
class Config:
    """Queries per tile, tiles of queries (and of dS) in flight, registers per thread of each role, programs.

    `dynamic`: one persistent program per multiprocessor computes tile after tile, so that the loads of the next overlap the
    stores of the last. Else one program per tile.
    """

    block_m: int
    stages: int = 2
    ds_stages: int = 2
    softmax_regs: int = 208
    dq_regs: int = 72
    dynamic: bool = False


def config(head_dim: int) -> Config:
    """The fastest configuration on an H200 for head_dim 64 and 128: as many queries per tile, and tiles in flight, as fit."""
    if head_dim not in (64, 128):
        raise SpecError(f"the Hopper backward pass is for heads of 64 or 128, not {head_dim}", fix=_OTHERS)
    if head_dim == 128:
        return Config(block_m=64, stages=3, ds_stages=1, dynamic=True)
    return Config(block_m=128, dynamic=True)


def tile_shape(head_dim: int, v_dim: int, limit: int = 0) -> tuple[int, int]:
    """(block_m, block_n) for heads of these widths; `limit` is a mask's block, which tiles must divide, or 0."""
    if v_dim != head_dim or (limit and limit < BLOCK_N):
        said = f"the Hopper backward pass has no tiles for heads {head_dim}/{v_dim} and blocks of {limit}"
        raise SpecError(said, fix=_OTHERS)
    return config(head_dim).block_m, BLOCK_N


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    tiles: Tiles,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of attention, from the tensors saved by its forward pass.

    q, out, d_out [B, Sq, H, D], k and v [B, Sk, KV, D] in bfloat16 or float16; lse, d_lse [B, H, Sq] float32, natural log.
    """
    return launch(q, k, v, out, lse, d_out, d_lse, tiles, scale, softcap, config(q.shape[3]))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    tiles: Tiles,
    scale: float,
    softcap: float | None,
    plan: Config,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` with a given configuration."""
    batch, seq_q, num_heads, head_dim = q.shape
    seq_k, num_kv_heads = k.shape[1], k.shape[2]
    q, k, v, d_out = (_for_tma(tensor) for tensor in (q, k, v, d_out))
    rows = plan.block_m
    num_m, num_n = -(-seq_q // rows), -(-seq_k // BLOCK_N)
    dq_sum = torch.empty(batch * num_heads * num_m * rows, head_dim, dtype=torch.float32, device=q.device)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    has_lists = not (tiles.causal or tiles.full)
    counter = (torch.zeros if has_lists else torch.empty)(2, dtype=torch.int32, device=q.device)
    grid = (num_m, num_heads, batch)
    lists, kind = _mask(tiles, counter)
    q_count, q_order = lists[0], lists[3]
    has_data = kind["HAS_DATA"][0]
    stats = torch.empty(batch * num_heads * num_m * (2 + has_data) * rows, dtype=torch.float32, device=q.device)
    prepare[grid](
        out, d_out, lse.contiguous(), lse if d_lse is None else d_lse.contiguous(), stats, dq_sum, counter,
        tiles.q_data if has_data else counter, q_count, q_order,
        *out.stride()[:3], *d_out.stride()[:3], *outer_strides(tiles.q_data if has_data else None),
        seq_q, num_heads, q_count.numel() // num_n, num_n, batch * num_kv_heads, _SHARE * num_sms(q.device),
        has_lists, has_data, d_lse is not None, head_dim, rows,
    )  # fmt: skip
    flat = NVMMASharedLayout(0, 32, rank=1)
    half = (1, 64, 1, head_dim)
    num_tiles = num_n * batch * num_kv_heads
    programs = min(num_sms(q.device), num_tiles) if plan.dynamic else num_tiles
    flash_backward[(programs,)](
        boxes(q, 1, rows, 1, head_dim), boxes(k, *half), boxes(v, *half), boxes(d_out, 1, rows, 1, head_dim),
        TensorDescriptor(stats, [stats.numel()], [1], [rows], flat), boxes(dq_sum, 64, 64),
        boxes(dk, *half), boxes(dv, *half), *lists,
        counter, scale, num_tiles, num_kv_heads, seq_q, seq_k,
        GROUP=num_heads // num_kv_heads, SOFTCAP=softcap, **kind,
        BM=rows, D=head_dim, STAGES=plan.stages, DS_STAGES=plan.ds_stages,
        SOFTMAX_REGS=plan.softmax_regs, DQ_REGS=plan.dq_regs, DYNAMIC=plan.dynamic,
        num_warps=4, maxnreg=128,
    )  # fmt: skip
    finish[grid](dq_sum, dq, *dq.stride()[:3], scale, seq_q, num_heads, head_dim, rows)
    return dq, dk, dv


def _mask(tiles: Tiles, none: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The kernel's run-time and compile-time arguments of the mask; `none` stands for absent tensors.
    if tiles.full or tiles.causal:
        kind = {"RULE": None, "QUERIES": None, "PARAMS": (), "HAS_DATA": (False, False)}
        return (none, none, none, none, 0, 0, none, 0, 0), kind | {"MASK": "full" if tiles.full else "causal"}
    has_data = (tiles.q_data is not None, tiles.k_data is not None)
    kind = {"RULE": tiles.gluon_rule(), "QUERIES": queries_of(tiles), "PARAMS": tiles.params, "HAS_DATA": has_data}
    q_order = torch.empty_like(tiles.q_count)
    lists = (tiles.q_count, tiles.q_index, tiles.q_partial, q_order, *outer_strides(tiles.q_count))
    return (*lists, tiles.k_data if has_data[1] else none, *outer_strides(tiles.k_data)), kind | {"MASK": "lists"}


def _for_tma(tensor: Tensor) -> Tensor:
    # The tensor memory accelerator takes rows whose last axis is contiguous and whose other strides are multiples of 16 bytes.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    unit = 16 // tensor.element_size()
    fits = tensor.stride(-1) == 1 and all(stride > 0 and stride % unit == 0 for stride in strides[:-1])
    return tensor if fits and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
