"""A feed-forward of several SwiGLU experts, of which a router chooses the best few for each token."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.feed_forwards.base import FeedForward
from hone.model.linear_spec import LinearSpec, Norm, Output, Piece, Product
from hone.ops import permute, swiglu, unpermute


class TopExperts(FeedForward):
    """top_k of num_experts for each token, balanced by an auxiliary loss. Fedus et al. 2021, arXiv:2101.03961."""

    paper: ClassVar[str] = "arXiv:2101.03961"

    intermediate_size: int = Field(gt=0, description="Width of an expert.")
    num_experts: int = Field(8, gt=0, description="Experts.")
    top_k: int = Field(2, gt=0, description="Experts that a token visits.")
    balance: float = Field(0.01, ge=0, description="Weight of the loss that balances the experts.")

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        inner, experts = self.intermediate_size, {"experts": self.num_experts, "share": self.top_k / self.num_experts}
        halves = Piece("gate", inner), Piece("up", inner)
        down = Piece("down", hidden_size)
        return (
            LinearSpec("router", hidden_size, (Piece("router", self.num_experts),), reads=Norm("feed_forward_norm")),
            LinearSpec("gate_up", hidden_size, halves, reads=Norm("feed_forward_norm"), shard="column", **experts),
            LinearSpec(
                "down",
                inner,
                (down,),
                reads=Product((Output("feed_forward.gate_up", "gate"), Output("feed_forward.gate_up", "up"))),
                shard="row",
                residual=True,
                **experts,
            ),
        )

    def build(self, place: Placement) -> TopExpertsLayer:
        return TopExpertsLayer(self, place)


class TopExpertsLayer(Block):
    """The module behind `TopExperts`. `forward(x [..., D], context) -> [..., D]`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec, tokens = self.spec, x.flatten(0, -2)
        shares = self.router(tokens).softmax(-1)
        weights, chosen = shares.topk(spec.top_k, -1)
        visits = F.one_hot(chosen, spec.num_experts).sum(1).to(x.dtype).mean(0)
        context.add_loss(spec.balance * spec.num_experts / spec.top_k * (visits * shares.mean(0)).sum())
        rows, ends, place = permute(tokens, chosen, spec.num_experts)
        made = self.down(swiglu(self.gate_up(rows, ends)), ends)
        return unpermute(made, place, weights).view_as(x)
