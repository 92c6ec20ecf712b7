"""GeGLU: a feed-forward gated by a GELU."""

from __future__ import annotations

from torch import Tensor

from hone.model.block import Placement
from hone.model.context import Context
from hone.model.feed_forwards.swiglu import SwiGLU, SwiGLULayer
from hone.ops import geglu


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)), gelu by its tanh approximation. Shazeer 2020, arXiv:2002.05202."""

    def build(self, place: Placement) -> GeGLULayer:
        return GeGLULayer(self, place)


class GeGLULayer(SwiGLULayer):
    """The module behind `GeGLU`. `forward(x [..., D], context) -> [..., D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.down(geglu(self.gate_up(x)))
