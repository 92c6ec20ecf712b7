"""The base of mixers, the part of a layer in which tokens attend to each other: a spec with its costs and its module.

A mixer's module is a `Block` with `forward(x [B, S, D], context) -> [B, S, D]` and, optional, `draw(context, x)`: it
draws the random tensors that the layer derives from its spec (random features, rotations) and keeps them. The decoder
calls it before the first layer of a pass, since torch.compile cannot trace a generator; the layer calls it when it runs
alone. These tensors are neither parameters nor buffers.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hone.base.errors import SpecError
from hone.cost.cache import LayerCache
from hone.cost.dims import Mixing, Widths
from hone.model.block import BlockSpec
from hone.model.context import Context


class Mixer(BlockSpec):
    """Base of every mixer's spec."""

    complexity: ClassVar[str] = ""
    """Work for a sequence of S tokens in big-O notation without head sizes: 'O(S w)'."""
    causal: ClassVar[bool] = True
    """Whether a token attends to itself and earlier tokens only; False: an encoder, which cannot generate."""
    can_share_kv: ClassVar[bool] = False
    """Whether a later layer may attend to this one's keys and values."""
    reuses_kv: ClassVar[bool] = False
    """Whether it attends to the keys and values of the nearest layer before it whose mixer `can_share_kv`."""

    by_layer: ClassVar[bool] = False
    """Whether it computes something else at another place in the stack: its random numbers are drawn for the layer's index."""

    def mixing_flops(self, seq_len: int) -> float:
        """Average FLOPs per token of a sequence of `seq_len` tokens, without the linears; a multiply-add is 2."""
        raise NotImplementedError

    def state_values(self, seq_len: int) -> float:
        """Numbers in the state that decoding keeps after `seq_len` tokens of a sequence."""
        raise NotImplementedError

    def prepare(self, context: Context, x: Tensor) -> None:
        """Prepares tensors that layers like this one share in a pass over x [..., D]; see `Context.expect`.

        By default the tables of its rotary positions, if it has any.
        """
        rope, head_dim = getattr(self, "rope", None), getattr(self, "head_dim", None)
        if rope is not None and head_dim is not None:
            context.rotary(rope, head_dim, x.dtype)

    def mixing(self) -> Mixing:
        """What `hone.cost` computes FLOPs and state from: the spec itself, or the same as plain data."""
        return self

    def widths(self, hidden_size: int) -> Widths:
        """Activations kept per token for the backward pass; by default the projections, as many rotated, and the mixed values."""
        parts = (*self.linears(hidden_size), *self.parameters(hidden_size))
        inward = [part for part in parts if not getattr(part, "residual", False)]
        projected = sum(n_out for part in inward for n_out, _ in part.matmuls)
        mixed = sum(part.in_features for part in parts if part not in inward)
        return Widths(projected=projected, turned=projected, mixed=mixed)

    def cache(self) -> LayerCache:
        """The tensors that the serving engine keeps for it between passes; empty for a mixer that the engine cannot serve.

        Its module writes and reads them through `Context.attend` (which stores "k" and "v") or `Context.attend_latent`
        ("latent"). A mixer that `reuses_kv` keeps none of its own.
        """
        return ()

    def check_source(self, source: Mixer) -> None:
        """Raises ValueError when it cannot attend to the keys of `source`. Only for a mixer that `reuses_kv`."""


def refuse_packed(context: Context, mixer: str) -> None:
    """Raises SpecError when sequences pack several documents, for mixers that cannot keep them apart."""
    if context.document_ids is not None:
        raise SpecError(
            f"mixer '{mixer}' cannot separate the documents of a packed sequence",
            fix="give every document a sequence of its own (hone.model.context.Causal), or choose another mixer",
        )
