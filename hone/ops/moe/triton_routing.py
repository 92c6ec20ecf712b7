"""The router in two kernels: logits of 16-bit weights summed in float32, then scores, the best experts and their weights.

The logits of few tokens are split over parts of the sum so that many programs read the router's weights; the second kernel adds
the parts in their order. Legend: T tokens, E experts, D width, S parts of D, k experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.ops.early import early_launch, launch_options, previous_kernel_done, start_next_kernel
from hone.ops.moe.local import SPREAD, LocalExperts

_SPREAD = tl.constexpr(SPREAD)


@triton.jit(do_not_specialize=["num_tokens"])
def router_logits(
    x, weight, parts, num_tokens, num_experts, width, x_stride,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """parts float32 [S, T, E]: x [T, D] times weight [E, D] transposed, over one part of D a program."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    part, num_parts = tl.program_id(2), tl.num_programs(2)
    blocks = tl.cdiv(tl.cdiv(width, BLOCK_K), num_parts)
    first = part * blocks * BLOCK_K
    last = tl.minimum(first + blocks * BLOCK_K, width)
    ks = tl.arange(0, BLOCK_K)
    rows = x + tokens.to(tl.int64)[:, None] * x_stride
    columns = weight + experts[None, :] * width
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    total = tl.zeros([TOKENS, EXPERTS], tl.float32)
    for begin in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        k = begin + ks
        inside = k < last
        given = tl.load(rows + k[None, :], mask=(tokens < num_tokens)[:, None] & inside[None, :], other=0.0)
        own = tl.load(columns + k[:, None], mask=(experts < num_experts)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(given, own, total)
    places = parts + (part.to(tl.int64) * num_tokens + tokens[:, None]) * num_experts + experts[None, :]
    tl.store(places, total, mask=(tokens < num_tokens)[:, None] & (experts < num_experts)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def best_experts(
    parts, bias, logit_bias, slots, copies, key, counts, counted, ids, weights, num_tokens, num_experts, num_parts, top_k, scale,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr, LOGIT_BIAS: tl.constexpr, COPIES: tl.constexpr, COUNTS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ids int32 [T, k] and weights float32 [T, k] of logits float32 [S, T, E]; of equal scores the first expert is best.

    With COPIES at most of each expert, 1 or more, ids are those of slots int32 [E, COPIES] (`LocalExperts`). COUNTS: visits are added to
    counts int64 [E], PADDED: those of tokens alone that are not 0 in counted [T].
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    real = (tokens < num_tokens)[:, None]
    known = (experts < num_experts)[None, :]
    places = tokens.to(tl.int64)[:, None] * num_experts + experts[None, :]
    previous_kernel_done(EARLY)
    start_next_kernel(EARLY)
    logits = tl.zeros([TOKENS, EXPERTS], tl.float32)
    at = parts + places
    for _ in range(num_parts):
        logits += tl.load(at, mask=real & known, other=0.0)
        at += num_tokens * num_experts
    if LOGIT_BIAS:
        logits += tl.load(logit_bias + experts, mask=experts < num_experts, other=0.0).to(tl.float32)[None, :]
    if SIGMOID:
        scores = tl.where(known, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    else:
        logits = tl.where(known, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    choice = scores
    if BIASED:
        choice = scores + tl.load(bias + experts, mask=experts < num_experts, other=0.0).to(tl.float32)[None, :]
    # A row that is not finite still gets experts that exist; its weights say what it is.
    choice = tl.where(choice == choice, choice, -3.0e38)
    choice = tl.where(known, tl.maximum(choice, -3.0e38), float("-inf"))
    # One number orders scores, and among equal ones experts: integers that compare as the scores do, above the experts' order.
    bits = choice.to(tl.int32, bitcast=True)
    keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (EXPERTS - 1 - experts)[None, :]
    ranks = tl.arange(0, TOP_K)[None, :]
    best = tl.zeros([TOKENS, TOP_K], tl.int32)
    share = tl.zeros([TOKENS, TOP_K], tl.float32)
    for j in tl.static_range(TOP_K):
        if j < top_k:
            most = tl.max(keys, 1)[:, None]
            first = EXPERTS - 1 - (most & 0xFFFFFFFF).to(tl.int32)
            taken = experts[None, :] == first
            if BIASED:
                score = tl.sum(tl.where(taken, scores, 0.0), 1)[:, None]
            else:
                high = (most >> 32).to(tl.int32)
                score = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                score = tl.where(score < -1.0, float("nan"), score)  # of a row that is not finite
            best = tl.where(ranks == j, first, best)
            share = tl.where(ranks == j, score, share)
            keys = tl.where(taken, -0x7FFFFFFFFFFFFFFF, keys)
    if NORMALIZE:
        added = 1e-20 if SIGMOID else 0.0
        share = share / (tl.sum(share, 1)[:, None] + added)
    if COUNTS:
        seen = real & (ranks < top_k)
        if PADDED:
            seen = seen & (tl.load(counted + tokens, mask=tokens < num_tokens, other=0) != 0)[:, None]
        tl.atomic_add(counts + best, tl.full([TOKENS, TOP_K], 1, tl.int64), mask=seen, sem="relaxed")
    if COPIES > 1:
        hashed = (tl.load(key + tokens, mask=tokens < num_tokens, other=0) * tl.full([TOKENS], _SPREAD, tl.int64)) >> 16
        best = tl.load(slots + best * COPIES + (hashed[:, None] % tl.load(copies + best)).to(tl.int32))
    elif COPIES == 1:
        best = tl.load(slots + best)
    to = tokens.to(tl.int64)[:, None] * top_k + ranks
    tl.store(ids + to, best, mask=real & (ranks < top_k))
    tl.store(weights + to, share * scale, mask=real & (ranks < top_k))


def logits_shape(num_tokens: int, num_experts: int, width: int) -> tuple[int, int, int, int]:
    """(tokens and experts of a tile, parts of the width, warps): 64 programs or more wherever parts allow it."""
    tokens = 16 if num_tokens <= 128 else 64
    experts = min(32 if num_tokens <= 32 else 64, max(16, triton.next_power_of_2(num_experts)))
    tiles = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_experts, experts)
    programs, most = (64, 8) if tokens == 16 else (256, 4)
    return tokens, experts, max(1, min(programs // tiles, width // 256, most)), 4


def launch_route(
    x: Tensor, weight: Tensor, bias: Tensor | None, logit_bias: Tensor | None, ids: Tensor, weights: Tensor, local: LocalExperts | None, *,
    sigmoid: bool, normalize: bool, scale: float,
) -> None:  # fmt: skip
    """Fills ids [T, k] and weights [T, k] for x [T, D] and the router's weight [E, D]; ids are slots where `local` is given."""
    (num_tokens, width), num_experts, top_k = x.shape, len(weight), ids.shape[1]
    if not num_tokens:
        return
    tokens, experts, num_parts, warps = logits_shape(num_tokens, num_experts, width)
    parts = torch.empty(num_parts, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    early = launch_options(early_launch(x.device))
    router_logits[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_experts, experts), num_parts)](
        x, weight, parts, num_tokens, num_experts, width, x.stride(0),
        TOKENS=tokens, EXPERTS=experts, BLOCK_K=min(128, triton.next_power_of_2(max(16, width))), STAGES=3, num_warps=warps, **early,
    )  # fmt: skip
    padded = max(16, triton.next_power_of_2(num_experts))
    rows = max(1, min(4, 1024 // padded)) if num_tokens > 64 else 1
    best_experts[(triton.cdiv(num_tokens, rows),)](
        parts, weights if bias is None else bias, weights if logit_bias is None else logit_bias, *_placed(local, ids), ids, weights, num_tokens, num_experts, num_parts, top_k, scale,
        TOKENS=rows, EXPERTS=padded, TOP_K=triton.next_power_of_2(top_k), SIGMOID=sigmoid, NORMALIZE=normalize, BIASED=bias is not None, LOGIT_BIAS=logit_bias is not None,
        COPIES=0 if local is None else local.slots.shape[1], COUNTS=local is not None and local.counts is not None,
        PADDED=local is not None and local.real is not None, num_warps=1 if rows * padded <= 256 else 4, **early,
    )  # fmt: skip


def _placed(local: LocalExperts | None, ids: Tensor) -> tuple[Tensor, ...]:
    """(slots, copies, key, counts, counted) for `best_experts`; `ids` where it reads none."""
    if local is None:
        return (ids,) * 5
    real = None if local.real is None else local.real.view(torch.uint8)
    return local.slots, local.copies, *(ids if one is None else one for one in (local.key, local.counts, real))
