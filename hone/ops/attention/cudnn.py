"""cuDNN's attention, through torch, with the signatures of hone's kernels: dense masks only.

It builds a plan for every new shape (about 50 ms on an H200), and sums dq's parts in no fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.attention.masks import Tiles

_ops = torch.ops.aten


def tile_shape(head_dim: int, v_dim: int, limit: int = 0) -> tuple[int, int]:
    """(block_m, block_n) of the Triton backward pass, which runs where lse has a gradient."""
    from hone.ops.attention import triton_backward as flash_backward

    return flash_backward.tile_shape(head_dim, v_dim, limit)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, H, Dv] and lse [B, H, Sq] of q [B, Sq, H, Dh], k [B, Sk, KV, Dh], v [B, Sk, KV, Dv]; see `hone.ops.attention.api`."""
    _check(tiles, softcap)
    q, k, v = (made.transpose(1, 2) for made in (q, k, v))
    out, lse, *_ = _ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, tiles.causal, False, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3])


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
    """(dq, dk, dv) in the layouts of q, k, v (contiguous); see `hone.ops.attention.api`. d_lse must be None."""
    _check(tiles, softcap)
    assert d_lse is None, (
        "cuDNN's attention takes no gradient of lse: `hone.ops.attention.api` sends such a call elsewhere"
    )
    q, k, v, out, d_out = (made.transpose(1, 2) for made in (q, k, v, out, d_out))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    grads = _ops._scaled_dot_product_cudnn_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse[..., None],
        unused,
        unused,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        tiles.causal,
        scale=scale,
    )
    dq, dk, dv = (made.transpose(1, 2).contiguous() for made in grads)
    return dq, dk, dv


def _check(tiles: Tiles, softcap: float | None) -> None:
    # cuDNN's causal mask is aligned to the first key, ours to the last: they agree for equal lengths.
    square = tiles.causal and tiles.seq_q == tiles.seq_k
    if not (square or tiles.full) or softcap is not None:
        mask = "full" if tiles.full else "causal" if tiles.causal else tiles.rule
        raise SpecError(
            f"backend 'cudnn' has the full mask and, for equal lengths, the causal one, without softcap: mask {mask}, "
            f"{tiles.seq_q} queries, {tiles.seq_k} keys, {softcap=}",
            fix="leave backend out, or give 'triton'",
        )
