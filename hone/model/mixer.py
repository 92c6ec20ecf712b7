"""What a mixer is: the part of a layer in which tokens see each other, as a spec that predicts its cost and builds its module.

A mixer's module is an `nn.Module` with `forward(x [B, S, D], context) -> [B, S, D]` and, for the decoder and checkpoints:
- `pieces`: each fused linear's rows by name and in order; `rows`: how many each has. Linears come from `make`;
- `residual`: the linear that writes to the residual stream, whose initialisation is scaled down;
- `initial` (optional): how parameters outside those linears begin, by their name in the module: (mean, std) of a normal,
  or a function of (shape, generator). Without an entry: normal of std 0.02; norms are ones and biases zeros.
- `draw` (optional): draw(context, x) makes what the layer derives from its spec at random and keeps, before the first layer
  of a pass runs: torch.compile can trace no draws. The layer calls it, too, for whoever runs it alone.
Parameters and registered buffers are saved and loaded; what is derived from the spec is no buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from hone.base.errors import SpecError
from hone.base.table import Technique
from hone.cost.cache import LayerCache
from hone.cost.facts import Mixing, Widths
from hone.model.context import Context
from hone.model.linear import MakeLinear

Initial = tuple[float, float] | Callable[[tuple[int, ...], torch.Generator], Tensor]
"""How a parameter begins: (mean, std), or what draws it in float32 on the CPU."""


class Mixer(Technique):
    """Base of every mixer's spec."""

    complexity: ClassVar[str] = ""
    """Work over a sequence of S tokens in big-O, the sizes of a head left out: 'O(S w)'."""
    causal: ClassVar[bool] = True
    """Whether a token sees nothing of what comes after it; False: an encoder's, which cannot generate."""
    lends: ClassVar[bool] = False
    """Whether a later layer may attend to this one's keys and values."""
    borrows: ClassVar[bool] = False
    """Whether it attends to the keys and values of the nearest layer before it that lends."""

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(n_out, k_in) of its matrix products as they are multiplied, fused ones once; the output projection last."""
        raise NotImplementedError

    def num_params(self, hidden_size: int) -> int:
        """Every stored number of the module; by default those of `matmuls`."""
        return sum(n_out * k_in for n_out, k_in in self.matmuls(hidden_size))

    def mixing_flops(self, seq_len: int) -> float:
        """FLOPs a token of a sequence of `seq_len` needs on average besides `matmuls`; a multiply-add is 2."""
        raise NotImplementedError

    def state_values(self, seq_len: int) -> float:
        """Numbers kept of a sequence of `seq_len` to decode on from it."""
        raise NotImplementedError

    def build(self, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> nn.Module:
        """The module; `layer` is its place in the stack (where a cache files its state), `name` its dotted path."""
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
        *inward, (_, mixed) = self.matmuls(hidden_size)
        projected = sum(n_out for n_out, _ in inward)
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
