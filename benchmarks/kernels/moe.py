"""Products of few tokens per expert, and tokens sorted by expert, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import grouped_linear, permute, unpermute

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    found = []
    for experts, out, width in ((128, 1536, 2048), (128, 2048, 768), (64, 2816, 2048)):
        found += [expert_row(limit, experts, out, width, each) for each in (1, 4, 16)]
    return found + permute_rows(limit, 8192, 8, 128, 2048)


def expert_row(limit: Ceilings, experts: int, out: int, width: int, each: int) -> dict[str, Any]:
    """The product of a decoding step's tokens with their experts' weights; two sets of weights alternate."""
    weights = [torch.randn(experts, out, width, **BF16) for _ in range(2)]
    x = torch.randn(experts * each, width, **BF16)
    ends = (torch.arange(experts, device="cuda") + 1).int() * each
    ours, theirs = interleaved(
        [
            lambda: [grouped_linear(x, weight, ends) for weight in weights],
            lambda: [F.grouped_mm(x, weight.mT, offs=ends) for weight in weights],
        ],
        calls=2,
    )
    return row(
        f"grouped_linear {experts} experts of {out} x {width}, {each} tokens each", ours,
        amount=2 * weights[0].numel(), unit="TB/s", ceiling=limit.read, peer="torch grouped_mm", peer_seconds=theirs,
        target=3, of_target=0.6,
    )  # fmt: skip


def permute_rows(limit: Ceilings, tokens: int, top_k: int, experts: int, width: int) -> list[dict[str, Any]]:
    """Rows to their experts and back, against torch's stable sort and gathers."""
    x = torch.randn(tokens, width, **BF16)
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices
    weights = torch.rand(tokens, top_k, **BF16)
    y, _, place = permute(x, ids, experts)
    num_bytes = 2 * (top_k + 1) * x.numel()
    found = []
    runs: dict[str, Callable[[str], Any]] = {
        "permute": lambda backend: permute(x, ids, experts, backend=backend),
        "unpermute": lambda backend: unpermute(y, place, weights, backend=backend),
    }
    for name, run in runs.items():
        ours, theirs = interleaved([partial(run, "triton"), partial(run, "reference")], captured=False)
        found.append(
            row(
                f"{name} {tokens} x {width}, {top_k} of {experts} experts", ours, amount=num_bytes, unit="TB/s",
                ceiling=limit.copy, peer="torch", peer_seconds=theirs,
            )
        )  # fmt: skip
    return found
