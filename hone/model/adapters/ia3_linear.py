"""The module behind `hone.model.adapters.ia3`: a frozen linear with factors of its inputs or outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.model.adapters.wrap import Adapted


class IA3Linear(Adapted):
    """A linear with factors ia3_l_NAME, of a piece's outputs [N, 1] or of the inputs [1, K]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N of all pieces], in x's dtype."""
        inputs, outputs = self._factors()
        y = self.inner(x if inputs is None else x * inputs.to(x.dtype))
        return y if outputs is None else y * outputs.to(y.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K] in `dtype`, factors included."""
        inputs, outputs = self._factors()
        weight = self.inner.dequantize(torch.float32)
        weight = weight if inputs is None else weight * inputs.float()
        return (weight if outputs is None else weight * outputs.float()[:, None]).to(dtype)

    @property
    def bias(self) -> Tensor | None:
        """As the forward pass adds it: an output's factor multiplies its bias, too."""
        outputs = self._factors()[1]
        return self.inner.bias if self.inner.bias is None or outputs is None else self.inner.bias * outputs

    def _factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Those of the inputs [K] and of all outputs [N of all pieces]; None: all are one."""
        if any(piece.name in self.spec.feedforward_modules for piece in self.pieces):
            return getattr(self, f"ia3_l_{self.pieces[0].name}").view(-1), None
        own = {piece.name: getattr(self, f"ia3_l_{piece.name}").view(-1) for piece in self.pieces}
        some = next(iter(own.values()))
        parts = [own.get(piece.name, some.new_ones(piece.out_features)) for piece in self.all_pieces]
        return None, torch.cat(parts)
