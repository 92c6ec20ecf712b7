"""LoRA: a product of two thin matrices beside each chosen linear, whose own weights are frozen.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hone.model.adapters.base import Adapter
from hone.model.adapters.wrap import Adapted
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece


class LoRA(Adapter):
    """y = W x + (alpha / rank) B A x: A [r, K] uniform and B [N, r] zero at first. Hu et al. 2021, arXiv:2106.09685."""

    paper: ClassVar[str] = "arXiv:2106.09685"

    rank: int = Field(16, gt=0, description="Rows of A, for each checkpoint module (PEFT's r).")
    alpha: float = Field(32.0, gt=0, description="B A is multiplied by alpha / rank (PEFT's lora_alpha).")

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        width = linear.in_features
        downs = [ParameterSpec(f"lora_A_{one.name}", (self.rank, width), uniform, multiplied=True) for one in pieces]
        ups = [
            ParameterSpec(f"lora_B_{one.name}", (one.out_features, self.rank), (0.0, 0.0), multiplied=True)
            for one in pieces
        ]
        return (*downs, *ups)

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> LoRALinear:
        return LoRALinear(self, inner.requires_grad_(False), linear, pieces)


class LoRALinear(Adapted):
    """A linear with its LoRA factors: lora_A_NAME [r, K] and lora_B_NAME [N, r] for each wrapped piece."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N of all pieces], in x's dtype."""
        return self.inner(x) + self._product(x)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype`, the factors' product included."""
        device = next(self.parameters(recurse=False)).device
        return self.inner.dequantize(dtype) + self._product(torch.eye(self.in_features, dtype=dtype, device=device)).T

    def _product(self, x: Tensor) -> Tensor:
        """The outputs of the factors, [..., N of all pieces]: zero where a piece is not wrapped."""
        parts = [self._added(one, x) for one in self.all_pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _added(self, piece: Piece, x: Tensor) -> Tensor:
        if piece not in self.pieces:
            return x.new_zeros(*x.shape[:-1], piece.out_features)
        down, up = getattr(self, f"lora_A_{piece.name}"), getattr(self, f"lora_B_{piece.name}")
        added = F.linear(F.linear(x, down.to(x.dtype)), up.to(x.dtype))
        return added if self.spec.scale == 1.0 else added * self.spec.scale


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The initial A [r, K], float32: uniform between -1 / sqrt(K) and 1 / sqrt(K), as PEFT draws it."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
