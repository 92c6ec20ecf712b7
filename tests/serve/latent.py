"""A mixer with a cache of its own kind, as a newcomer would add it: one file, and one line in the mixers' table."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from hone.cost.cache import CacheTensor, LayerCache
from hone.model.context import Context
from hone.model.linear import MakeLinear
from hone.model.mixer import Mixer


class LatentMixer(Mixer):
    """Attention in which one latent a token is the key and the value of every head."""

    num_heads: int = Field(gt=0, description="Heads.")
    latent_dim: int = Field(gt=0, description="Width of the latent.")

    def matmuls(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        wide = self.num_heads * self.latent_dim
        return ((wide, hidden_size), (self.latent_dim, hidden_size), (hidden_size, wide))

    def mixing_flops(self, seq_len: int) -> float:
        return 4.0 * self.num_heads * self.latent_dim * (seq_len + 1) / 2

    def state_values(self, seq_len: int) -> float:
        return float(self.latent_dim * seq_len)

    def cache(self) -> LayerCache:
        return (CacheTensor("latent", (self.latent_dim,)),)

    def build(self, hidden_size: int, layer: int, name: str, norm_eps: float, make: MakeLinear) -> LatentLayer:
        return LatentLayer(self, hidden_size, layer, name, make)


class LatentLayer(nn.Module):
    """The module behind `LatentMixer`."""

    pieces: ClassVar[dict[str, tuple[str, ...]]] = {"q": ("q",), "down": ("down",), "out": ("out",)}
    residual: ClassVar[str] = "out"

    def __init__(self, spec: LatentMixer, hidden_size: int, layer: int, name: str, make: MakeLinear) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        wide = spec.num_heads * spec.latent_dim
        self.rows = {"q": [wide], "down": [spec.latent_dim], "out": [hidden_size]}
        self.q = make(f"{name}.q", hidden_size, wide, False)
        self.down = make(f"{name}.down", hidden_size, spec.latent_dim, False)
        self.out = make(f"{name}.out", wide, hidden_size, False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        spec, scale = self.spec, self.spec.latent_dim**-0.5
        q, latent = self.q(x).unflatten(-1, (spec.num_heads, -1)), self.down(x)
        if context.cached:
            mixed = context.attend_latent(self.layer, q, latent, value_dim=spec.latent_dim, scale=scale)
        else:
            same = latent.unsqueeze(-2)
            mixed = context.attend(self.layer, q, same, same, scale=scale, window=None)
        return self.out(torch.flatten(mixed, -2))
