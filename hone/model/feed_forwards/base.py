"""What a feed-forward is: the part of a layer that works on each token alone, as a spec that declares its weights."""

from __future__ import annotations

from hone.model.block import BlockSpec


class FeedForward(BlockSpec):
    """Base of every feed-forward's spec. Its module's `forward(x [..., D], context) -> [..., D]`.

    The context is there for a router: `context.add_loss` takes what balances its experts.
    """

    def inner_size(self, hidden_size: int) -> int:
        """Numbers a token has in front of the projections to the residual stream, over all experts it visits."""
        ends = [linear for linear in self.linears(hidden_size) if linear.residual]
        return sum(columns for linear in ends for _, columns in linear.matmuls)
