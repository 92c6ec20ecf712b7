"""Norm, gate, rotation into pages and the optimizer's step against torch and torch.compile.

Bytes are those an op must move: its inputs and outputs once. Rows of decode size fit in the L2 cache and are bound by a
launch, so they have no share of a ceiling to reach. A step is a forward and a backward pass; its launches are hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import rms_norm, rope, rope_write, swiglu

BF16 = {"device": "cuda", "dtype": torch.bfloat16}

compiled = partial(torch.compile, dynamic=False)
"""The peer compiled for each shape, its fastest form."""


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    found = []
    for tokens in (16384, 64):
        found += norm_rows(limit, tokens, 4096) + gate_rows(limit, tokens, 14336) + [rope_row(limit, tokens)]
        torch.cuda.empty_cache()
    return [*found, *norm_rows(limit, 16384, 8192), adamw_row(limit)]


def against_compile(
    limit: Ceilings,
    figure: str,
    num_bytes: int,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    large: bool,
    captured: bool = True,
) -> dict[str, Any]:
    one, two = interleaved([ours, theirs], captured=captured)
    share = {"of_target": 0.85} if large else {}
    return row(
        figure, one, amount=num_bytes, unit="TB/s", ceiling=limit.copy, peer="torch.compile", peer_seconds=two,
        target=1.0, **share,
    )  # fmt: skip


def step(op: Callable[..., Any], inputs: Sequence[Tensor], flows: Sequence[Tensor]) -> Callable[[], Any]:
    """Forward and backward in one call."""
    leaves = [one.detach().requires_grad_() for one in inputs]

    def run() -> Any:
        out = op(*leaves)
        out = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(out, leaves, flows[: len(out)])

    return run


def norm_rows(limit: Ceilings, tokens: int, width: int) -> list[dict[str, Any]]:
    """rms_norm with its residual: two reads, two writes; the backward pass three reads, one write."""
    x, residual, flow, flow_sum = torch.randn(4, tokens, width, **BF16).unbind()
    weight = torch.rand(width, **BF16)

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, 1e-5, residual)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x + residual, weight, 1e-5, backend="reference"), x + residual

    theirs, given, large = compiled(plain), (x, residual, weight), tokens > 1024
    name = f"rms_norm + residual {tokens} x {width}"
    flows = (flow, flow_sum)
    found = [
        against_compile(limit, name, 8 * x.numel(), lambda: ours(*given), lambda: theirs(*given), large),
    ]
    if large:
        runs = step(ours, given, flows), step(theirs, given, flows)
        found.append(against_compile(limit, f"{name}, step", 16 * x.numel(), *runs, False, captured=False))
    return found


def gate_rows(limit: Ceilings, tokens: int, width: int) -> list[dict[str, Any]]:
    """swiglu: 3 values moved per output, 5 more in the backward pass."""
    gate_up, flow = torch.randn(tokens, 2 * width, **BF16), torch.randn(tokens, width, **BF16)
    theirs, large = compiled(partial(swiglu, backend="reference")), tokens > 1024
    name = f"swiglu {tokens} x 2 x {width}"
    found = [against_compile(limit, name, 6 * flow.numel(), lambda: swiglu(gate_up), lambda: theirs(gate_up), large)]
    if large:
        runs = step(swiglu, (gate_up,), (flow,)), step(theirs, (gate_up,), (flow,))
        found.append(against_compile(limit, f"{name}, step", 16 * flow.numel(), *runs, False, captured=False))
    return found


def rope_row(limit: Ceilings, tokens: int) -> dict[str, Any]:
    """Queries rotated in place, rotated keys and values written to pages; the peer returns new queries."""
    heads, kv_heads, head_dim, page_size = 32, 8, 128, 64
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, **BF16)
    turn = torch.randn(tokens, 1, head_dim // 2, device="cuda")
    cos, sin = turn.cos().bfloat16(), turn.sin().bfloat16()
    slots = torch.arange(tokens, device="cuda") + 40
    places = slots // page_size, slots % page_size
    k_pages, v_pages = torch.zeros(2, tokens // page_size + 2, kv_heads, page_size, head_dim, **BF16)

    @compiled
    def theirs(qkv: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        k_pages[pages, :, offsets] = rope(k, cos, sin, backend="reference")
        v_pages[pages, :, offsets] = v
        return rope(q, cos, sin, backend="reference")

    return against_compile(
        limit, f"rope + KV write {tokens} tokens, {heads}/{kv_heads} d{head_dim}", 4 * qkv.numel(),
        lambda: rope_write(*qkv.split([heads, kv_heads, kv_heads], 1), cos, sin, k_pages, v_pages, *places),
        lambda: theirs(qkv, k_pages, v_pages, *places), tokens > 1024,
    )  # fmt: skip


def adamw_row(limit: Ceilings) -> dict[str, Any]:
    """torch's fused AdamW, which hone uses: reads weight, gradient and two moments, writes three."""
    weights = [torch.randn(4096, 14336, device="cuda") for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    (seconds,) = interleaved([optimizer.step], captured=False)
    num_bytes = 7 * 4 * sum(weight.numel() for weight in weights)
    return row("adamw (torch's fused)", seconds, amount=num_bytes, unit="TB/s", ceiling=limit.copy, of_target=0.85)
