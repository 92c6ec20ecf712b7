"""Dense and causal attention against cuDNN through torch's SDPA, forward and backward, at 16k tokens a batch; its memory.

FLOPs are 4 B H S^2 D forward and 2.5 times that backward, halved for a causal mask; a backward pass counts all its kernels.
Each side has the layout it likes best: hone [B, S, H, D] as a projection leaves it, cuDNN [B, H, S, D].
Heads of 96, 192 and 256 are cuDNN's on both sides: those rows say what its layout and the way through hone's op cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import attend
from hone.ops.attention.masks import CAUSAL, FULL, Mask

NUM_TOKENS = 16384
PEER = "cuDNN through SDPA"


def rows(limits: Ceilings) -> list[dict[str, Any]]:
    """Heads of 128 and 64, causal and full, sequences of 2k, 8k and 16k; other widths, causal, 8k; memory a token."""
    made = []
    for head_dim, num_heads in ((128, 16), (64, 32)):
        for name, mask in (("causal", CAUSAL), ("full", FULL)):
            for seq_len in (2048, 8192, 16384):
                made += measured(head_dim, num_heads, name, mask, seq_len, limits)
    for head_dim, num_heads in ((96, 16), (192, 8), (256, 8)):
        made += measured(head_dim, num_heads, "causal", CAUSAL, 8192, limits)
    return made + memory_rows()


def measured(
    head_dim: int, num_heads: int, name: str, mask: Mask, seq_len: int, limits: Ceilings
) -> list[dict[str, Any]]:
    """The forward and the backward row of one shape."""
    batch = NUM_TOKENS // seq_len
    ours = [randoms(batch, seq_len, num_heads, head_dim) for _ in range(4)]
    theirs = [part.transpose(1, 2).contiguous() for part in ours]
    causal = mask is CAUSAL

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    flops = 4 * batch * num_heads * seq_len**2 * head_dim * (0.5 if causal else 1.0)
    label = f"d{head_dim} {name} s{seq_len}"
    long = seq_len >= 8192
    forward = interleaved([lambda: attend(*ours[:3], mask), lambda: cudnn(*theirs[:3])])
    backward = backward_seconds([(lambda q, k, v: attend(q, k, v, mask), ours), (cudnn, theirs)], 2 if long else 8)
    targets = {128: ((1.1 if long else 1.05), (1.05 if long else 1.0)), 64: (1.0, 0.95)}.get(head_dim, (0.9, 0.95))
    made = []
    for pass_name, seconds, amount, target in zip(
        ("fwd", "bwd"), (forward, backward), (flops, 2.5 * flops), targets, strict=True
    ):
        made.append(
            row(
                f"attend {pass_name} {label}",
                seconds[0],
                amount=amount,
                unit="TFLOP/s",
                ceiling=limits.gemm,
                peer=PEER,
                peer_seconds=seconds[1],
                target=target,
            )
        )
    return made


def randoms(*shape: int) -> Tensor:
    """Normal bfloat16 numbers on the GPU."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def backward_seconds(runs: list[tuple[Callable[..., Tensor], list[Tensor]]], calls: int) -> list[float]:
    """Median seconds of each backward pass, in turn; each run is a function of q, k, v and [q, k, v, gradient of out].

    Autograd cannot be captured apart from its forward pass: `calls` in a row hide what the CPU takes to start the first.
    """
    passes = []
    for function, (*inputs, d_out) in runs:
        leaves = [part.detach().requires_grad_() for part in inputs]
        out = function(*leaves)

        def backward(out: Tensor = out, leaves: list[Tensor] = leaves, d_out: Tensor = d_out) -> None:
            for _ in range(calls):
                torch.autograd.grad(out, leaves, d_out, retain_graph=True)

        passes.append(backward)
    return interleaved(passes, captured=False, calls=calls)


def memory_rows() -> list[dict[str, Any]]:
    """Memory per token of a causal forward and backward pass beside its inputs (16 heads of 128), gradients included.

    `ratio` is the need at 16k over that at this length: 1 where memory is linear in the length.
    """
    made: list[dict[str, Any]] = []
    for seq_len in (16384, 32768, 65536, 131072):
        leaves = [randoms(1, seq_len, 16, 128).requires_grad_() for _ in range(3)]
        d_out = randoms(1, seq_len, 16, 128)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(attend(*leaves), leaves, d_out)
        torch.cuda.synchronize()
        need = (torch.cuda.max_memory_allocated() - before) / seq_len / 1024
        del leaves, d_out, grads
        figure = {"figure": f"attend fwd+bwd peak memory s{seq_len}", "value": need, "unit": "KiB/token"}
        first = made[0]["value"] if made else need
        made.append(figure | {"peer": "attend at s16384", "peer_value": first, "ratio": first / need, "target": 0.98})
    return made
