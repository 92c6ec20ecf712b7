"""What a mixer is: the part of a layer in which tokens see each other, as a spec that predicts its cost and builds its module.

A mixer's module is a `Block` with `forward(x [B, S, D], context) -> [B, S, D]` and, optional, `draw(context, x)`: it makes
what the layer derives from its spec at random and keeps, before the first layer of a pass runs: torch.compile can trace no
draws. The layer calls it, too, for whoever runs it alone. What is derived from the spec is no parameter and no buffer.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.cache import LayerCache
from hone.cost.facts import Mixing, Widths
from hone.model.block import BlockSpec
from hone.model.context import Context


class Mixer(BlockSpec):
    """Base of every mixer's spec."""

    complexity: ClassVar[str] = ""
    """Work over a sequence of S tokens in big-O, the sizes of a head left out: 'O(S w)'."""
    causal: ClassVar[bool] = True
    """Whether a token sees nothing of what comes after it; False: an encoder's, which cannot generate."""
    lends: ClassVar[bool] = False
    """Whether a later layer may attend to this one's keys and values."""
    borrows: ClassVar[bool] = False
    """Whether it attends to the keys and values of the nearest layer before it that lends."""

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs a token of a sequence of `seq_len` needs on average besides its linears; a multiply-add is 2."""
        raise NotImplementedError

    def state_values(self, seq_len: int) -> float:
        """Numbers kept of a sequence of `seq_len` to decode on from it."""
        raise NotImplementedError

    def prepare(self, context: Context, x: Tensor) -> None:
        """Makes what layers like this one share in a pass over x [..., D], before the first layer runs (see `Context.expect`).

        By default the tables of its rotary positions, if it has any.
        """
        rope, head_dim = getattr(self, "rope", None), getattr(self, "head_dim", None)
        if rope is not None and head_dim is not None:
            context.rotary(rope, head_dim, x.dtype)

    def mixing(self) -> Mixing:
        """What `hone.cost` asks for FLOPs and state: the spec itself, or the same as plain data."""
        return self

    def widths(self, hidden_size: int) -> Widths:
        """Numbers a token kept for the backward pass; by default: projections in, as much made of them, the result."""
        parts = (*self.linears(hidden_size), *self.parameters(hidden_size))
        inward = [part for part in parts if not getattr(part, "residual", False)]
        projected = sum(n_out for part in inward for n_out, _ in part.matmuls)
        mixed = sum(part.in_features for part in parts if part not in inward)
        return Widths(projected=projected, turned=projected, mixed=mixed)

    def cache(self) -> LayerCache:
        """The tensors that the serving engine keeps for it between passes; empty for a mixer that the engine cannot serve.

        Its module fills and reads them through `Context.attend` (which stores "k" and "v") or `Context.attend_latent`
        ("latent"). A mixer that `borrows` keeps none of its own.
        """
        return ()

    def check_source(self, source: Mixer) -> None:
        """Raises ValueError when it cannot attend to the keys of `source`. Only for a mixer that `borrows`."""


def refuse_packed(context: Context, mixer: str) -> None:
    """Raises SpecError when `context` packs several documents into a row, for mixers that cannot keep them apart."""
    if context.document_ids is not None:
        raise SpecError(
            f"mixer '{mixer}' cannot keep documents of one row apart",
            fix="give every document a row of its own (hone.model.context.Causal), or take another mixer",
        )
