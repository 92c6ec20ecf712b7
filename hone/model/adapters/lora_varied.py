"""LoRA whose pieces have ranks and scales of their own, or whose factors do not see all of their inputs in a training step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.adapters.wrap import Adapted


class VariedLoRALinear(Adapted):
    """A linear with its LoRA factors, computed piece by piece. Dropout is drawn for each piece, in steps that compute gradients alone."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N of all pieces], in x's dtype."""
        parts = []
        for piece, _ in self.rows():
            if piece not in self.pieces:
                parts.append(x.new_zeros(*x.shape[:-1], piece.out_features))
                continue
            drops = self.spec.dropout > 0 and self.training and torch.is_grad_enabled()
            seen = F.dropout(x, self.spec.dropout) if drops else x
            down, up = (getattr(self, f"{name}_{piece.name}").to(x.dtype) for name in ("lora_A", "lora_B"))
            parts.append(F.linear(F.linear(seen, down), up) * self.spec.of_piece(piece.name).scale)
        return self.inner(x) + torch.cat(parts, -1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype`, the factors' product included."""
        weight = self.inner.dequantize(dtype).clone()
        for piece, rows in self.rows():
            if piece in self.pieces:
                down, up = (getattr(self, f"{name}_{piece.name}").to(dtype) for name in ("lora_A", "lora_B"))
                weight[rows] += self.spec.of_piece(piece.name).scale * (up @ down)
        return weight
