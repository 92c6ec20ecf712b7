"""A mixer with a cache of its own kind, as a newcomer would add it: one file, and one line in the mixers' table."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from hone.cost.cache import CacheTensor, LayerCache
from hone.model.block import Block, Placement
from hone.model.context import Context
from hone.model.linear_spec import Computed, LinearSpec, Piece, projection_in, projection_out
from hone.model.mixer import Mixer


class LatentMixer(Mixer):
    """Attention in which one latent a token is the key and the value of every head."""

    num_heads: int = Field(gt=0, description="Heads.")
    latent_dim: int = Field(gt=0, description="Width of the latent.")

    def linears(self, hidden_size: int) -> tuple[LinearSpec, ...]:
        queries = Piece("q", self.num_heads * self.latent_dim, self.num_heads)
        return (
            projection_in("q", hidden_size, queries),
            projection_in("down", hidden_size, Piece("down", self.latent_dim), shard="none"),
            projection_out(hidden_size, self.num_heads, self.latent_dim, reads=Computed("mixer.mixed")),
        )

    def mixing_flops(self, seq_len: int) -> float:
        return 4.0 * self.num_heads * self.latent_dim * (seq_len + 1) / 2

    def state_values(self, seq_len: int) -> float:
        return float(self.latent_dim * seq_len)

    def cache(self) -> LayerCache:
        return (CacheTensor("latent", (self.latent_dim,)),)

    def build(self, place: Placement) -> LatentLayer:
        return LatentLayer(self, place)


class LatentLayer(Block):
    """The module behind `LatentMixer`."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec, scale = self.spec, self.spec.latent_dim**-0.5
        q, latent = self.q(x).unflatten(-1, (spec.num_heads, -1)), self.down(x)
        if context.cached:
            mixed = context.attend_latent(self.layer, q, latent, value_dim=spec.latent_dim, scale=scale)
        else:
            same = latent.unsqueeze(-2)
            mixed = context.attend(self.layer, q, same, same, scale=scale, window=None)
        return self.out(torch.flatten(mixed, -2))
