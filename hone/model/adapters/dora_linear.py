"""The module behind `hone.model.adapters.dora`: LoRA's factors beside a frozen linear, and a trained length of each of its rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.adapters.wrap import Adapted
from hone.model.linear import Dense
from hone.model.linear_spec import Piece


class DoRALinear(Adapted):
    """A linear with its LoRA factors and the lengths of its rows, lora_magnitude_vector_NAME [N], for each wrapped piece."""

    _squares: Tensor | None = None

    def squares(self) -> Tensor:
        """The squared length of each row of the frozen weight, float32 [N of all pieces]; computed once."""
        if self._squares is None:
            with torch.no_grad():
                self._squares = self.inner.dequantize(torch.float32).square().sum(1)
        return self._squares

    @torch.no_grad()
    def start(self) -> None:
        """The lengths become those of the rows of the frozen weight."""
        squares = self.squares()
        for piece, rows in self.rows():
            if piece in self.pieces:
                getattr(self, f"lora_magnitude_vector_{piece.name}").copy_(squares[rows].sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N of all pieces], in x's dtype."""
        y = self.inner(x)
        parts = []
        for piece, rows in self.rows():
            part = y[..., rows]
            if piece in self.pieces:
                down, up = (getattr(self, f"{name}_{piece.name}").to(x.dtype) for name in ("lora_A", "lora_B"))
                bias = None if self.bias is None else self.bias[rows]
                part = part if bias is None else part - bias
                part = part + F.linear(F.linear(x, down), up) * self.spec.of_piece(piece.name).scale
                part = part * self._stretch(piece, rows).to(x.dtype)
                part = part if bias is None else part + bias
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype` as the forward pass multiplies it."""
        weight = self.inner.dequantize(torch.float32).clone()
        for piece, rows in self.rows():
            if piece in self.pieces:
                down, up = (getattr(self, f"{name}_{piece.name}").float() for name in ("lora_A", "lora_B"))
                weight[rows] += self.spec.of_piece(piece.name).scale * up @ down
                weight[rows] *= self._stretch(piece, rows)[:, None]
        return weight.to(dtype)

    def _stretch(self, piece: Piece, rows: slice) -> Tensor:
        """m / n, float32 [N]. n^2 = |W|^2 + 2 s (W A^T . B) + s^2 (B (A A^T) . B), summed over r: B A is never formed."""
        with torch.no_grad():
            down, up = (getattr(self, f"{name}_{piece.name}").float() for name in ("lora_A", "lora_B"))
            scale = self.spec.of_piece(piece.name).scale
            crossed = self._crossed(down, rows)
            own = ((up @ (down @ down.T)) * up).sum(1)
            length = (self.squares()[rows] + 2 * scale * (crossed * up).sum(1) + scale**2 * own).clamp_min(0).sqrt()
        return getattr(self, f"lora_magnitude_vector_{piece.name}").float() / length

    def _crossed(self, down: Tensor, rows: slice) -> Tensor:
        """W A^T of a piece, float32 [N, r]: A goes through the frozen linear as r tokens would."""
        if isinstance(self.inner, Dense):
            return F.linear(down.to(self.weight.dtype), self.weight[rows]).T.float()
        return self.inner.dequantize(torch.float32)[rows] @ down.T
