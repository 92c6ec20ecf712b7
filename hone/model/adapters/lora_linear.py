"""The module behind `hone.model.adapters.lora`: a frozen linear and its two thin matrices, one operation in training.

Shapes: K input features, N output rows of a checkpoint module, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.model.adapters.wrap import Adapted
from hone.model.linear import Dense
from hone.model.linear_spec import Piece
from hone.model.quantized.dequantizing import Dequantizing
from hone.model.quantized.nf4 import NF4
from hone.model.quantized.packed_int import PackedInt
from hone.ops import lora_linear, swiglu


class LoRALinear(Adapted):
    """A linear with its LoRA factors: lora_A_NAME [r, K] and lora_B_NAME [N, r] for each wrapped piece."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N of all pieces], in x's dtype."""
        weight = frozen_weight(self.inner) if torch.is_grad_enabled() else None
        return self.inner(x) + self._product(x) if weight is None else self._trained(x, weight, gated=False)

    def of_gate_up(self, gate_up: Tensor) -> Tensor:
        """The same of swiglu(gate_up), which training computes again in the backward pass: [..., 2K] -> [..., N]."""
        seen = self._forward_hooks or self._forward_pre_hooks
        weight = frozen_weight(self.inner) if torch.is_grad_enabled() and not seen else None
        return self(swiglu(gate_up)) if weight is None else self._trained(gate_up, weight, gated=True)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype`, the factors' product included."""
        device = next(self.parameters(recurse=False)).device
        return self.inner.dequantize(dtype) + self._product(torch.eye(self.in_features, dtype=dtype, device=device)).T

    def _trained(self, x: Tensor, weight: Callable[[torch.dtype], Tensor], *, gated: bool) -> Tensor:
        """As one operation, whose backward pass keeps x alone and makes no gradient of the frozen weight."""
        begins = {piece.name: begin for piece, begin in zip(self.all_pieces, self._begins(), strict=True)}
        names = [piece.name for piece in self.all_pieces if piece in self.pieces]
        downs = [getattr(self, f"lora_A_{name}").to(x.dtype) for name in names]
        ups = [getattr(self, f"lora_B_{name}").to(x.dtype) for name in names]
        options = {"scale": self.spec.scale, "begins": [begins[name] for name in names], "gated": gated}
        bias = self.inner.bias
        return lora_linear(x, weight, None if bias is None else bias.to(x.dtype), downs, ups, **options)

    def _begins(self) -> list[int]:
        """The first output feature of each of all pieces."""
        return [0, *accumulate(piece.out_features for piece in self.all_pieces[:-1])]

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


def frozen_weight(linear: nn.Module) -> Callable[[torch.dtype], Tensor] | None:
    """What gives the weight of a frozen linear whose product is x W^T + b, so that it may be one with that of the factors.

    None where it is not (rounded inputs, factors of its own), is trained, or has hooks, which must see its inputs.
    """
    plain = type(linear) in (Dense, NF4, Dequantizing, PackedInt) and not linear._forward_pre_hooks
    if not plain or linear._forward_hooks or any(one.requires_grad for one in linear.parameters(recurse=False)):
        return None
    return linear.dequantize


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """The initial A [r, K], float32: uniform between -1 / sqrt(K) and 1 / sqrt(K), as PEFT draws it."""
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
