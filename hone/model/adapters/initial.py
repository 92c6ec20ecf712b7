"""Initial distributions of adapters' parameters; torch is imported when they are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def uniform(inputs: int) -> Callable[..., Any]:
    """That of torch's linears and LSTMs: uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs), float32."""

    def drawn(shape: tuple[int, ...], generator: Any) -> Any:
        import torch

        bound = inputs**-0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return drawn
