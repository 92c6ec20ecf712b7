"""The linear head's loss against torch and torch.compile: time, and memory beyond inputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import linear_cross_entropy

BF16 = {"device": "cuda", "dtype": torch.bfloat16}

compiled = partial(torch.compile, dynamic=False)
"""The peer compiled for each shape, its fastest form."""


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    return loss_rows(limit)


def loss_rows(limit: Ceilings) -> list[dict[str, Any]]:
    """Time and memory of cross entropy over a head of Llama 3's size, forward and backward."""
    tokens, width, vocab = 8192, 4096, 128256
    x = torch.randn(tokens, width, **BF16).requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    plain = compiled(lambda x, weight, targets: F.cross_entropy(F.linear(x, weight).float(), targets))

    def step(loss: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = weight.grad = None
            loss(x, weight, targets).backward()

        return run

    runs = [step(linear_cross_entropy), step(plain)]
    grown = [_peak_bytes(run, x, weight) / 2**20 for run in runs]
    ours, theirs = interleaved(runs, captured=False, min_time_s=1.0)
    x.grad = weight.grad = None
    name = f"linear_cross_entropy {tokens} x {width} x {vocab}, step"
    memory = {
        "figure": f"{name}: peak beyond inputs and gradients",
        "value": grown[0],
        "unit": "MiB",
        "peer": "torch.compile",
        "peer_value": grown[1],
        "ratio": grown[1] / grown[0],
        "target": 8.0,
    }
    flop = 6 * tokens * width * vocab
    return [
        row(
            name, ours, amount=flop, unit="TFLOP/s", ceiling=limit.gemm,
            peer="torch.compile", peer_seconds=theirs, target=1.2,
        ),
        memory,
    ]  # fmt: skip


def _peak_bytes(run: Callable[[], None], *leaves: Tensor) -> int:
    run()
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(leaf.numel() * leaf.element_size() for leaf in leaves)
