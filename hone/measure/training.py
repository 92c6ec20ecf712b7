"""The rates of a training step beside products and copies: attention by length, kernels, fp8 linears, and what a GPU sustains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from hone.measure.calibration import LAYOUTS, AttentionRate, KernelRate, LinearRate
from hone.measure.timer import Probe, Timer

ATTENTION, TRAINED, KERNEL, FP8 = "attention", "attention, trained", "kernel", "fp8"
"""First parts of the names of probes: (ATTENTION or TRAINED, length), (KERNEL, name), (FP8, recipe, held, passes, rows, outputs, inputs)."""

Kernels = Callable[[str, str], Mapping[Hashable, Probe]]
"""From (device, dtype) the probes of the kernels that a training runs, which a room above this one has."""

GPU_LENGTHS = (512, 2048, 8192, 32768)
"""Lengths at which attention is timed on a GPU: its rate grows with the pairs of a tile, by a half from the first to the last."""

GPU_TOKENS, GPU_HEADS, GPU_HEAD_DIM = 16384, 32, 128
"""Tokens of all sequences together (one sequence where it is longer), and the heads."""

SUSTAINED_S = 2.0
"""Seconds of work without a pause after which a GPU has the clock that its power limit allows."""

_FEW_ROWS = 4096

_LARGE_FLOPS = 1e11
"""From these on a product is bound by arithmetic on a GPU."""


def gpu_attention(
    device: str, dtype: str, attend: Callable[[Any, Any, Any], Any] | None = None, *, num_kv_heads: int = GPU_HEADS
) -> dict[Hashable, Probe]:
    """Probes of causal attention forward, and forward and backward, at each of GPU_LENGTHS.

    `attend` takes q [B, S, H, D], k and v [B, S, KV, D]; None: torch's. In float32, without tensor cores, only of the short ones.
    """
    found: dict[Hashable, Probe] = {}
    for seq_len in GPU_LENGTHS if dtype != "float32" else GPU_LENGTHS[:2]:
        sizes = max(GPU_TOKENS // seq_len, 1), seq_len, GPU_HEADS, GPU_HEAD_DIM
        found |= attention(device, dtype, sizes, attend, num_kv_heads=num_kv_heads)
    return found


def attention(
    device: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    attend: Callable[[Any, Any, Any], Any] | None = None,
    *,
    num_kv_heads: int | None = None,
) -> dict[Hashable, Probe]:
    """Both probes of causal attention over (B, S, H, D) `sizes`."""
    batch, seq_len, heads, head_dim = sizes
    kv = num_kv_heads or heads
    made: list[Any] = []

    def qkv() -> list[Any]:
        if not made:  # of one length at a time
            # The layout of a decoder: queries, keys and values side by side for each token.
            shape = batch, seq_len, heads + 2 * kv, head_dim
            joined = torch.randn(shape, device=device).to(getattr(torch, dtype))
            made.extend(one.detach() for one in joined.split([heads, kv, kv], dim=2))
        return made

    def run(q: Any, k: Any, v: Any) -> Any:
        if attend is not None:
            return attend(q, k, v)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def train() -> object:
        leaves = [one.detach().requires_grad_() for one in qkv()]
        mixed = run(*leaves)
        return torch.autograd.grad(mixed, leaves, mixed.detach())

    flops = 4.0 * batch * heads * head_dim * seq_len * (seq_len + 1) / 2
    return {
        (ATTENTION, seq_len): Probe(lambda: run(*qkv()), flops, 0.1),
        (TRAINED, seq_len): Probe(train, flops, 0.15, wants_grad=True),
    }


def attention_rates(dtype: str, rate: Callable[[Hashable], float], names: Sequence[Any]) -> tuple[AttentionRate, ...]:
    """The measured rates by length."""
    return tuple(
        AttentionRate(
            dtype=dtype,
            seq_len=name[1],
            forward_flops_per_s=rate(name),
            train_flops_per_s=rate((TRAINED, name[1])),
        )
        for name in names
        if name[0] == ATTENTION
    )


def kernel_rates(dtype: str, rate: Callable[[Hashable], float], names: Sequence[Any]) -> tuple[KernelRate, ...]:
    """The measured bandwidths of kernels."""
    return tuple(KernelRate(kernel=name[1], dtype=dtype, bytes_per_s=rate(name)) for name in names if name[0] == KERNEL)


def linear_rates(rate: Callable[[Hashable], float], names: Sequence[Any]) -> tuple[LinearRate, ...]:
    """The measured rates of fp8 linears."""
    return tuple(
        LinearRate(
            recipe=name[1], held=name[2], passes=name[3], m=name[4], n=name[5], k=name[6], flops_per_s=rate(name)
        )
        for name in names
        if name[0] == FP8
    )


def sustained(timer: Timer, dtype: str, probes: Mapping[Any, Probe], seconds: Mapping[Any, float]) -> dict[str, float]:
    """The rate of arithmetic in work that lasts, as a fraction of the rate in `seconds`, those of calls on their own.

    A GPU that computes without a pause meets its power limit and lowers its clock. The work is that of a training step: large
    products in all layouts, attention, and the kernels that move memory, which keep their rate. By `dtype`; 'float8' with linears of
    fp8 in the place of the products.
    """
    products = [name for name in probes if name[0] in LAYOUTS and probes[name].amount > _LARGE_FLOPS]
    # Of each shape once, in the recipe of most trainings; many rows alone are as many as a step's.
    linears = [name for name in probes if name[:4] == (FP8, "rowwise", False, "trained") and name[4] > _FEW_ROWS]
    trained = [name for name in probes if name[0] == TRAINED and name[1] >= 2048]
    moving = [name for name in probes if name[0] == KERNEL]
    found = {dtype: _lasting(timer, probes, seconds, [*products, *trained], moving)} if products else {}
    return found | ({"float8": _lasting(timer, probes, seconds, [*linears, *trained], moving)} if linears else {})


def _lasting(
    timer: Timer, probes: Mapping[Any, Probe], seconds: Mapping[Any, float], large: Sequence[Any], moving: Sequence[Any]
) -> float:
    """The fraction of their rates that the `large` calls keep among themselves and `moving` ones."""
    took: list[float] = []
    begun = timer.clock()
    while not took or timer.clock() - begun < SUSTAINED_S:
        before = timer.clock()
        for name in (*large, *moving):
            with torch.set_grad_enabled(probes[name].wants_grad):
                probes[name].work()
        timer.wait()
        took.append(timer.clock() - before)
    typical = statistics.median(took[len(took) // 2 :])
    computing, moved = (sum(seconds[name] for name in names) for names in (large, moving))
    return min(1.0, computing / max(typical - moved, computing / 2))
