"""The module behind `hone.model.adapters.dora`: LoRA's factors beside a frozen linear, and a trained length of each of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.model.adapters.lora_linear import frozen_weight
from hone.model.adapters.wrap import Adapted
from hone.ops import dora_linear, swiglu
from hone.ops.lora.dora import stretch


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
        weight = frozen_weight(self.inner)
        return self._beside(x) if weight is None else self._whole(x, weight, gated=False)

    def of_gate_up(self, gate_up: Tensor) -> Tensor:
        """The same of swiglu(gate_up), which training computes again in the backward pass: [..., 2K] -> [..., N]."""
        seen = self._forward_hooks or self._forward_pre_hooks
        weight = frozen_weight(self.inner) if torch.is_grad_enabled() and not seen else None
        return self(swiglu(gate_up)) if weight is None else self._whole(gate_up, weight, gated=True)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype` as the forward pass multiplies it."""
        weight = self.inner.dequantize(torch.float32)
        given = self._given(torch.float32)
        stretched = stretch(weight, self.squares(), **given)
        weight = weight.clone()
        for down, up, scale, begin in zip(given["downs"], given["ups"], given["scales"], given["begins"], strict=True):
            weight[begin : begin + len(up)] += scale * up @ down
        return (weight * stretched[:, None]).to(dtype)

    def _whole(self, x: Tensor, weight: Callable[[torch.dtype], Tensor], *, gated: bool) -> Tensor:
        """As one operation with the frozen product."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return dora_linear(x, weight, bias, self.squares(), gated=gated, **self._given(x.dtype))

    def _beside(self, x: Tensor) -> Tensor:
        """Of a frozen linear that does more than a product, as one that rounds its inputs: it runs as it is."""
        given = self._given(x.dtype)
        stretched = stretch(self.inner.dequantize(x.dtype), self.squares(), **given)
        y, added, end = self.inner(x), list[Tensor](), 0
        y = y if self.bias is None else y - self.bias
        for down, up, scale, begin in zip(given["downs"], given["ups"], given["scales"], given["begins"], strict=True):
            added += [x.new_zeros(*x.shape[:-1], begin - end), F.linear(F.linear(x, down), up) * scale]
            end = begin + len(up)
        whole = y + torch.cat([*added, x.new_zeros(*x.shape[:-1], self.out_features - end)], -1)
        out = (whole * stretched).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def _given(self, dtype: torch.dtype) -> dict[str, Any]:
        """The factors in `dtype` and the rest of what `dora_linear` takes, of the wrapped pieces in order."""
        wrapped = [(piece, rows) for piece, rows in self.rows() if piece in self.pieces]
        return {
            "downs": [getattr(self, f"lora_A_{piece.name}").to(dtype) for piece, _ in wrapped],
            "ups": [getattr(self, f"lora_B_{piece.name}").to(dtype) for piece, _ in wrapped],
            "magnitudes": [getattr(self, f"lora_magnitude_vector_{piece.name}") for piece, _ in wrapped],
            "scales": [self.spec.of_piece(piece.name).scale for piece, _ in wrapped],
            "begins": [rows.start for _, rows in wrapped],
        }
