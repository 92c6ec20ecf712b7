"""A trainable product of two thin matrices beside each chosen linear, whose own weights are frozen."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hone.model.adapters.base import LinearAdapter
from hone.model.adapters.wrap import Adapted
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece


class LowRank(LinearAdapter):
    """y = W x + scale B A x with A normal and B zero at first. Hu et al. 2021, arXiv:2106.09685."""

    paper: ClassVar[str] = "arXiv:2106.09685"

    rank: int = Field(4, gt=0, description="Rows of A.")
    scale: float = Field(2.0, description="What B A is multiplied with.")

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        width = linear.in_features
        downs = [ParameterSpec(f"a_{one.name}", (self.rank, width), multiplied=True) for one in pieces]
        ups = [
            ParameterSpec(f"b_{one.name}", (one.out_features, self.rank), (0.0, 0.0), multiplied=True) for one in pieces
        ]
        return (*downs, *ups)

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> LowRankLinear:
        return LowRankLinear(self, inner.requires_grad_(False), linear, pieces)


class LowRankLinear(Adapted):
    """The wrapper."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.spec.scale * torch.cat([self._added(one, x) for one in self.all_pieces], -1)

    def _added(self, piece: Piece, x: Tensor) -> Tensor:
        if piece not in self.pieces:
            return x.new_zeros(*x.shape[:-1], piece.out_features)
        return F.linear(F.linear(x, getattr(self, f"a_{piece.name}")), getattr(self, f"b_{piece.name}"))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self(torch.eye(self.in_features, dtype=dtype, device=self.weight.device)).T
