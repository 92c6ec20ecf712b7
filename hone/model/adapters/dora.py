"""DoRA: LoRA for the direction of each output row of a weight, and a trained vector for its length.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from hone.model.adapters.lora import LoRA
from hone.model.adapters.wrap import Adapted
from hone.model.linear import Dense
from hone.model.linear_spec import LinearSpec, ParameterSpec, Piece


class DoRA(LoRA):
    """y = m / n (W + s B A) x, n the length of each row of W + s B A, taken as a constant by the gradient; m begins as that of W. Liu et al. 2024, arXiv:2402.09353."""

    paper: ClassVar[str] = "arXiv:2402.09353"
    stored: ClassVar[dict[str, str]] = {**LoRA.stored, "lora_magnitude_vector": "lora_magnitude_vector"}

    @model_validator(mode="after")
    def _no_dropout(self) -> DoRA:
        if self.dropout:
            raise ValueError(
                "dropout does not work with dora, whose product with the frozen weight would be needed twice"
            )
        return self

    def parameters(self, linear: LinearSpec, pieces: tuple[Piece, ...]) -> tuple[ParameterSpec, ...]:
        lengths = (
            ParameterSpec(f"lora_magnitude_vector_{one.name}", (one.out_features,), (1.0, 0.0)) for one in pieces
        )
        return (*super().parameters(linear, pieces), *lengths)

    def wrap(self, inner: nn.Module, linear: LinearSpec, pieces: tuple[Piece, ...]) -> Adapted:
        return DoRALinear(self, inner.requires_grad_(False), linear, pieces)

    @torch.no_grad()
    def start(self, module: nn.Module) -> None:
        """The lengths are those of the rows of W, since B is zero."""
        squares = module.squares()
        for piece, rows in module.rows():
            if piece in module.pieces:
                getattr(module, f"lora_magnitude_vector_{piece.name}").copy_(squares[rows].sqrt())

    def peft_values(self) -> dict[str, Any]:
        return super().peft_values() | {"use_dora": True}

    @classmethod
    def of_peft(cls, values: Mapping[str, Any]) -> DoRA | None:
        return cls.model_validate({"kind": "dora", **cls.options_of(values)}) if values.get("use_dora") else None


class DoRALinear(Adapted):
    """A linear with its LoRA factors and the lengths of its rows, lora_magnitude_vector_NAME [N], for each wrapped piece."""

    _squares: Tensor | None = None

    def squares(self) -> Tensor:
        """The squared length of each row of the frozen weight, float32 [N of all pieces]; computed once."""
        if self._squares is None:
            with torch.no_grad():
                self._squares = self.inner.dequantize(torch.float32).square().sum(1)
        return self._squares

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
