"""The base of feed-forwards, the part of a layer that works on each token alone: a spec that declares its weights."""

from __future__ import annotations

from hone.model.block import BlockSpec


class FeedForward(BlockSpec):
    """Base of every feed-forward's spec. Its module's `forward(x [..., D], context) -> [..., D]`.

    A router passes its load-balancing loss to `context.add_loss`.
    """

    @property
    def causal(self) -> bool:
        """Whether a token's result depends on no later token."""
        return True

    @property
    def whole_sequences(self) -> bool:
        """Whether what is computed in training depends on the tokens of whole sequences, which ranks may then not share."""
        return False

    def routed_values(self, hidden_size: int) -> int:
        """Numbers per token of the rows that experts are given and give back."""
        return 0

    def inner_size(self, hidden_size: int) -> int:
        """Width of the input of the projections to the residual stream, summed over the experts a token is routed to."""
        ends = [linear for linear in self.linears(hidden_size) if linear.residual]
        return sum(columns for linear in ends for _, columns in linear.matmuls)
