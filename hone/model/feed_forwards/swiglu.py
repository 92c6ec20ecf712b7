"""SwiGLU: a gated feed-forward."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.feed_forwards.base import FeedForward
from hone.model.linear import Dense
from hone.model.linear_spec import LinearSpec, Norm, Output, Piece, Product
from hone.ops import gated_linear, swiglu


class SwiGLU(FeedForward):
    """down(silu(gate(x)) * up(x)). Shazeer 2020, arXiv:2002.05202."""

    paper: ClassVar[str] = "arXiv:2002.05202"
    splits: ClassVar[tuple[str, ...]] = ("intermediate_size",)
    reads_once: ClassVar[bool] = True

    intermediate_size: int = Field(gt=0, description="Width between up and down.")
    bias: bool = Field(False, description="Biases on all three projections.")

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        inner = self.intermediate_size
        product = Product((Output("feed_forward.gate_up", "gate"), Output("feed_forward.gate_up", "up")))
        return (
            LinearSpec(
                "gate_up", hidden_size, (Piece("gate", inner), Piece("up", inner)),
                reads=Norm("feed_forward_norm"), shard="column", bias=self.bias,
            ),
            LinearSpec(
                "down", inner, (Piece("down", hidden_size),),
                reads=product, shard="row", bias=self.bias, residual=True,
            ),
        )  # fmt: skip

    def build(self, place: Placement) -> SwiGLULayer:
        return SwiGLULayer(self, place)


class SwiGLULayer(Block):
    """The module behind `SwiGLU`. `forward(x [..., D], context) -> [..., D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        of_gate_up = getattr(self.down, "of_gate_up", None)  # an adapter's, which need not keep the activation
        if of_gate_up is None and not torch.is_grad_enabled() and _plain(self.gate_up):
            return self.down(gated_linear(x, self.gate_up.weight))
        gate_up = self.gate_up(x)
        return self.down(swiglu(gate_up)) if of_gate_up is None else of_gate_up(gate_up)


def _plain(linear: nn.Module) -> bool:
    """Whether a call of the linear is a product with its weight alone, and nothing watches it."""
    return type(linear) is Dense and linear.bias is None and not (linear._forward_hooks or linear._forward_pre_hooks)
