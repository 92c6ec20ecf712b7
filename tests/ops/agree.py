"""How tests compare backends: outputs and gradients of two of them, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def agree(run: Callable[[str], Sequence[torch.Tensor]], other: str = "reference", close: float = 1e-4) -> None:
    for ours, plain in zip(run("triton"), run(other), strict=True):
        torch.testing.assert_close(ours, plain, atol=close, rtol=close)


def graded(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The output and its gradients under an upstream that differs everywhere."""
    flow = torch.arange(out.numel()).cos().view(out.shape)
    return [out, *torch.autograd.grad(out, leaves, flow.to(out.dtype))]
