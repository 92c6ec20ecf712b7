"""Softmax attention under any mask, and the exact union of its parts: public functions, GPU ops and their gradients.

Legend: B batch, Sq and Sk the queries' and keys' sequence lengths, H query heads, KV key/value heads, Dh and Dv head widths of
keys and values. Kernels are in `triton_*.py`, `gluon_*.py` and `cudnn.py`; each backend's modules share the signatures
forward(q, k, v, tiles, scale, softcap) -> (out, lse), backward(q, k, v, out, lse, d_out, d_lse, tiles, scale, softcap) ->
(dq, dk, dv) and tile_shape(head_dim, v_dim, limit) -> (block_m, block_n).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.base.errors import SpecError
from hone.ops.attention import reference
from hone.ops.attention.checks import check, scale_of
from hone.ops.attention.masks import CAUSAL, Mask, Tiles
from hone.ops.dispatch import backend_of

_FORWARD = {
    "gluon": "hone.ops.attention.gluon_forward",
    "triton": "hone.ops.attention.triton_forward",
    "cudnn": "hone.ops.attention.cudnn",
}
_BACKWARD = {
    "gluon": "hone.ops.attention.gluon_backward",
    "triton": "hone.ops.attention.triton_backward",
    "cudnn": "hone.ops.attention.cudnn",
}

_LONG = 512
"""Tokens from which on building a library's plan for each new shape pays off."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Any:
    """softmax(q k^T scale) v over the keys that `mask` allows for each query; Vaswani et al. 2017, arXiv:1706.03762.

    q [B, Sq, H, Dh], k [B, Sk, KV, Dh], v [B, Sk, KV, Dv], one floating dtype, H a multiple of KV (consecutive query heads
    share a key head, arXiv:2305.13245) -> out [B, Sq, H, Dv] in that dtype, and with `return_lse` lse float32 [B, H, Sq]: the
    natural log of the softmax's denominator, which `merge` needs; it is differentiable. A query that attends to no key
    has out 0 and lse -inf. `scale` is Dh^-0.5 unless given. `softcap` c replaces a score s by c tanh(s / c), arXiv:2408.00118.
    `sinks` [H] adds to each head's softmax (and lse) one score without a value, arXiv:2309.17453. `deterministic` makes
    gradients bit-equal from run to run. Raises SpecError for shapes, dtypes and options that do not fit together.
    """
    check(q, k, v, mask, sinks)
    scale = scale_of(q, scale, softcap)
    extras = return_lse or sinks is not None or softcap is not None
    dense = softcap is None and _is_dense(mask, q.shape[1], k.shape[1])
    case = (q.device, q.dtype, q.shape[-1], v.shape[-1], mask.block, dense)
    chosen = _choose(*case, not extras, backend)
    if chosen == "torch":
        if extras:
            raise SpecError(
                f"backend 'torch' has no lse, no sinks and no softcap: {return_lse=}, sinks "
                f"{'given' if sinks is not None else 'None'}, {softcap=}",
                fix="leave backend out, or give 'reference' or 'triton'",
            )
        return _sdpa(q, k, v, mask, scale)
    if chosen == "reference":
        out, lse = reference.attend(q, k, v, mask, scale=scale, softcap=softcap)
    else:
        wants_grad = torch.is_grad_enabled() and any(made.requires_grad for made in (q, k, v))
        reverse = ""
        if wants_grad:
            reverse = _choose_backward(*case, deterministic, backend)
        out, lse = _fused(q, k, v, mask, scale, softcap, chosen, reverse)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    mask: Mask = CAUSAL,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attend` over these keys, which may be a part of those of the softmax: the sums over all parts are exact.

    `out` [B, Sq, H, Dv] in q's dtype and `lse` float32 [B, H, Sq] are those of all keys together (`merge`), as is the
    gradient `d_out`; the rest as in `attend`. No part sees another: the way of ring attention, arXiv:2310.01889.
    """
    check(q, k, v, mask, None)
    scale = scale_of(q, scale, softcap)
    wide = (*q.shape[:3], v.shape[3])
    for name, made, shape in (
        ("out", out, wide),
        ("d_out", d_out, wide),
        ("lse", lse, (q.shape[0], q.shape[2], q.shape[1])),
    ):
        if made.shape != shape:
            raise SpecError(
                f"{name} is of shape {list(made.shape)}, not {list(shape)}",
                fix="give out and lse of attend(..., return_lse=True), merged over all parts, and the gradient of out",
            )
    dense = softcap is None and _is_dense(mask, q.shape[1], k.shape[1])
    case = (q.device, q.dtype, q.shape[-1], v.shape[-1], mask.block, dense)
    chosen = _choose(*case, False, backend)
    if chosen in ("torch", "reference"):
        return reference.backward(q, k, v, out, lse, d_out, mask, scale=scale, softcap=softcap)
    reverse = _choose_backward(*case, False, backend)
    blocks = _blocks(chosen, reverse, q.shape[3], v.shape[3], mask.block)[2:]
    tiles = mask.tiles(q.shape[1], k.shape[1], *blocks, q.device, transposed=True)
    kind = "causal" if tiles.causal else "full" if tiles.full else "lists"
    return _attend_backward_op(
        q, k, v, out.contiguous(), lse.contiguous(), d_out, None, tiles.q_data, tiles.k_data, tiles.lists, blocks,
        tiles.rule, list(tiles.params), kind, scale, softcap, reverse,
    )  # fmt: skip


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys from attention over each: [(out, lse), ...] -> (out, lse).

    out [B, S, H, Dv], lse float32 [B, H, S] (-inf where a query attends to no key of a part). Exact; used by ring
    attention (arXiv:2310.01889), split keys, shared prefixes and rounds of hashing. Differentiable in every out and lse.
    Raises SpecError for no parts and for parts of different shapes.
    """
    if not parts:
        raise SpecError(
            "merge got 0 parts, and needs at least one part", fix="give (out, lse) of attend(return_lse=True)"
        )
    outs, lses = zip(*parts)
    if any(made.shape != outs[0].shape for made in outs) or any(made.shape != lses[0].shape for made in lses):
        raise SpecError(
            f"merge's parts have different shapes: {[(list(out.shape), list(lse.shape)) for out, lse in parts]}",
            fix="give parts of the same queries: out [B, Sq, H, Dv] and lse [B, H, Sq] of equal sizes in all",
        )
    stacked = torch.stack(tuple(lses))
    highest = stacked.detach().amax(0)
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(stacked - highest)
    total = weights.sum(0)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    shares = (weights / total).transpose(2, 3)[..., None]
    joined = sum(
        (share * out.to(share.dtype) for share, out in zip(shares, outs)), start=torch.zeros_like(shares[0, :1])
    )
    return joined.to(outs[0].dtype), (highest + total.log()).masked_fill(blind, float("-inf"))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention whose softmax has one more score a head, sinks [H], from those without: exact and differentiable.

    out [B, S, H, Dv], lse [B, H, S] (-inf where a query attends to no key): the shares of all keys shrink by
    sigmoid(lse - sink).
    """
    scores = sinks.to(lse.dtype)[:, None]
    kept = torch.sigmoid(lse - scores)
    return (out * kept.transpose(1, 2)[..., None]).to(out.dtype), torch.logaddexp(lse, scores)


def sinks_gradient(out: Tensor, lse: Tensor, d_out: Tensor, sinks: Tensor) -> Tensor:
    """The gradient by sinks [H] of attention with them, from its (out, lse) and the gradient of out; that of lse is zero.

    A sink is a key whose value is zero: its score's gradient is -share * (out . d_out), summed over all queries.
    """
    exact = torch.promote_types(out.dtype, torch.float32)
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    told = (out.to(exact) * d_out.to(exact)).sum(-1).transpose(1, 2)
    return -(share * told).sum((0, 2)).to(sinks.dtype)


# Branches, so that torch.compile guards on the lengths and passes constants to the backend.


def _is_square(mask: Mask, seq_q: int, seq_k: int) -> bool:
    """Whether this mask, aligned to the last key, equals a library's causal mask, aligned to the first key."""
    square = False
    if mask.is_causal and seq_q == seq_k:
        square = True
    return square


def _is_dense(mask: Mask, seq_q: int, seq_k: int) -> bool:
    """Whether a library offers this mask and the sequences are long enough for its plan to pay off."""
    dense = False
    if min(seq_q, seq_k) >= _LONG and (mask.is_full or _is_square(mask, seq_q, seq_k)):
        dense = True
    return dense


# torch.compile treats the results of these as constants: it cannot trace them.


@torch.compiler.assume_constant_result
def _choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    block: int,
    dense: bool,
    plain: bool,
    forced: str | None,
) -> str:
    case = {"dtype": dtype, "head_dim": head_dim, "v_dim": v_dim, "block": block, "dense": dense, "plain": plain}
    return backend_of("attend", device, forced, **case)


@torch.compiler.assume_constant_result
def _choose_backward(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_dim: int,
    block: int,
    dense: bool,
    deterministic: bool,
    forced: str | None,
) -> str:
    forced = "triton" if forced is not None and deterministic else forced
    case = {"head_dim": head_dim, "v_dim": v_dim, "block": block, "dense": dense, "deterministic": deterministic}
    return backend_of("attend_backward", device, forced, **case)


@torch.compiler.assume_constant_result
def _blocks(forward: str, reverse: str, head_dim: int, v_dim: int, limit: int) -> list[int]:
    """The tile sizes of the forward pass and, if there is one, of the backward pass."""
    blocks = list(importlib.import_module(_FORWARD[forward]).tile_shape(head_dim, v_dim, limit))
    if reverse:
        blocks += importlib.import_module(_BACKWARD[reverse]).tile_shape(head_dim, v_dim, limit)
    return blocks


def tile_sizes(device: torch.device, dtype: torch.dtype, head_dim: int, v_dim: int, block: int = 0) -> list[int]:
    """[block_m, block_n] of the forward kernel that `attend` would run on a sparse mask, then of the backward kernel."""
    chosen = _choose(device, dtype, head_dim, v_dim, block, False, True, None)
    reverse = _choose_backward(device, dtype, head_dim, v_dim, block, False, False, None)
    return _blocks(chosen, reverse, head_dim, v_dim, block)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention."""
    causal = _is_square(mask, q.shape[1], k.shape[1])
    kept = None if causal or mask.is_full else mask.kept_dense(q.shape[1], k.shape[1], q.device)
    share = q.shape[2] // k.shape[2]
    if share > 1 and q.is_cuda and (kept is not None or q.dtype == torch.float32):
        # Of CUDA's fused kernels only FlashAttention supports grouped-query heads, and neither masks nor float32: torch
        # would fall back to storing every score. Repeated keys are far smaller than scores.
        k, v, share = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2), 1
    q, k, v = (made.transpose(1, 2) for made in (q, k, v))
    options = {"attn_mask": kept, "is_causal": causal, "scale": scale, "enable_gqa": share > 1}
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, backend: str, reverse: str
) -> tuple[Tensor, Tensor]:
    """The kernels of `backend`, with those of `reverse` for the gradient ('' for none)."""
    sizes = (q.shape[1], k.shape[1])
    blocks = _blocks(backend, reverse, q.shape[3], v.shape[3], mask.block)
    ahead = mask.tiles(*sizes, blocks[0], blocks[1], q.device)
    lists = ahead.lists
    if reverse:
        lists = lists + mask.tiles(*sizes, blocks[2], blocks[3], q.device, transposed=True).lists
    kind = "causal" if ahead.causal else "full" if ahead.full else "lists"
    return _attend_op(
        q, k, v, ahead.q_data, ahead.k_data, lists, blocks, ahead.rule, list(ahead.params), kind, scale, softcap,
        backend, reverse,
    )  # fmt: skip


def _rows(made: Tensor) -> Tensor:
    """`made`, copied only if its last axis is not contiguous or its rows are not 16-byte aligned."""
    grain = 16 // made.element_size()
    aligned = made.stride(-1) == 1 and all(stride % grain == 0 and stride > 0 for stride in made.stride()[:-1])
    if aligned and made.data_ptr() % 16 == 0:
        return made
    width = made.shape[-1]
    if width % grain == 0:
        return made.clone(memory_format=torch.contiguous_format)
    return F.pad(made, (0, -width % grain))[..., :width]


def _unpack(
    q: Tensor, k: Tensor, q_data: Tensor | None, k_data: Tensor | None, lists: Sequence[Tensor], blocks: Sequence[int],
    rule: str, params: Sequence[int], kind: str,
) -> Tiles:  # fmt: skip
    return Tiles(
        rule, tuple(params), q_data, k_data, kind == "causal", kind == "full", q.shape[1], k.shape[1], *blocks, *lists
    )


@torch.library.custom_op("hone::attend", mutates_args=())
def _attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_data: Tensor | None,
    k_data: Tensor | None,
    lists: Sequence[Tensor],
    blocks: Sequence[int],
    rule: str,
    params: Sequence[int],
    kind: str,
    scale: float,
    softcap: float | None,
    backend: str,
    reverse: str,
) -> tuple[Tensor, Tensor]:
    # `lists` and `blocks` hold the entries of the forward pass, then, if there is a `reverse`, those of the backward pass.
    if q.numel() == 0 or k.shape[1] == 0:
        return _empty_out(q, v).zero_(), _empty_lse(q).fill_(float("-inf"))
    tiles = _unpack(q, k, q_data, k_data, lists[:4], blocks[:2], rule, params, kind)
    return importlib.import_module(_FORWARD[backend]).forward(_rows(q), _rows(k), _rows(v), tiles, scale, softcap)


@_attend_op.register_fake
def _(q, k, v, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_out(q, v), _empty_lse(q)


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@torch.library.custom_op("hone::attend_backward", mutates_args=())
def _attend_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    q_data: Tensor | None,
    k_data: Tensor | None,
    lists: Sequence[Tensor],
    blocks: Sequence[int],
    rule: str,
    params: Sequence[int],
    kind: str,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.shape[1] == 0:
        return _like(q).zero_(), _like(k).zero_(), _like(v).zero_()
    tiles = _unpack(q, k, q_data, k_data, lists, blocks, rule, params, kind)
    module = importlib.import_module(_BACKWARD[backend])
    q, k, v, d_out = (_rows(made) for made in (q, k, v, d_out))
    return module.backward(q, k, v, out, lse, d_out, d_lse, tiles, scale, softcap)


@_attend_backward_op.register_fake
def _(q, k, v, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(made: Tensor) -> Tensor:
    return made.new_empty(made.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_data, k_data, lists, blocks, *rest = inputs
    out, lse = output
    lists = list(lists)[4:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, q_data, k_data, *lists)
    ctx.num_lists = len(inputs[5])
    ctx.blocks = list(blocks)[2:]
    ctx.rest = rest


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, q_data, k_data, *lists = ctx.saved_tensors
    rule, params, kind, scale, softcap, _, reverse = ctx.rest
    if d_out is None:
        d_out = torch.zeros_like(out)
    if reverse == "cudnn" and d_lse is not None:
        reverse = "triton"  # its lse is the same, and it supports a gradient of lse
    grads = _attend_backward_op(
        q, k, v, out, lse, d_out, d_lse, q_data, k_data, lists, ctx.blocks, rule, params, kind, scale, softcap, reverse
    )
    # An empty list of ints is treated as a list of tensors, whose gradient must be a list.
    return (*grads, None, None, [None] * ctx.num_lists, None, None, [] if len(params) == 0 else None, *[None] * 5)


_attend_op.register_autograd(_backward, setup_context=_setup)
