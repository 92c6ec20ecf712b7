"""Sampling against the same in torch, at one sequence and at 64."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.timing import Ceilings, interleaved, row
from hone.ops import sample
from hone.ops.sample.noise import noise_keys


def rows(limit: Ceilings) -> list[dict[str, Any]]:
    """All rows of this area."""
    return sample_rows(limit, 1, 128256) + sample_rows(limit, 64, 128256)


def sample_rows(limit: Ceilings, count: int, vocab: int) -> list[dict[str, Any]]:
    """A step's draws: noise computed where it is added, thresholds without a sort; the peer is the torch reference."""
    logits = torch.randn(count, vocab, device="cuda") * 3
    keys = noise_keys(range(count), range(count), device="cuda")
    heat, share = torch.full((count,), 0.8, device="cuda"), torch.full((count,), 0.9, device="cuda")
    found = []
    for name, options in (("temperature", {}), ("top-p", {"top_p": share})):
        ours, theirs = interleaved(
            [
                lambda backend=backend, options=options: sample(logits, heat, **options, keys=keys, backend=backend)
                for backend in ("triton", "reference")
            ],
            captured=False,
        )
        found.append(
            row(
                f"sample {count} x {vocab}, {name}", ours, amount=4 * logits.numel(), unit="TB/s", ceiling=limit.read,
                peer="torch", peer_seconds=theirs,
            )
        )  # fmt: skip
    return found
