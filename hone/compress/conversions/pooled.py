"""Tensors whose key/value heads are pooled. Shapes: G heads before, of which each of g that stay replaces G / g; Dh channels a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hone.model.decoder import draw_initial
from hone.model.linear_spec import NormSpec
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import DeclaredTensor

Pooling = Literal["mean", "first", "random"]


def recipe(made: DeclaredTensor, mixer: Any, heads: int, pooling: Pooling, key: str) -> Pooled | None:
    """How a tensor of a layer is made whose attention `mixer` gets `heads` key/value heads; None: it has none of their rows.

    Its name is the same before and after.
    """
    if made.path == "mixer.qkv" and made.module is not None:
        parts, begin = [], 0
        for piece in made.module.linear.pieces:  # those of the converted layer
            inside = made.module.rows.start <= begin < made.module.rows.stop
            if inside and piece.name in ("k", "v"):
                parts.append((mixer.num_kv_heads * mixer.head_dim, True))
            elif inside:
                parts.append((piece.out_features, False))
            begin += piece.out_features
        return (
            Pooled(made.name, tuple(parts), mixer.num_kv_heads, heads, pooling, key)
            if any(one for _, one in parts)
            else None
        )
    over = made.parameter.over if isinstance(made.parameter, NormSpec) else None
    if over is not None and over.piece == "k":  # one norm over all heads
        parts = [(mixer.num_kv_heads * mixer.head_dim, True)]
        return Pooled(
            made.name, tuple(parts), mixer.num_kv_heads, heads, "mean" if pooling == "random" else pooling, key
        )
    return None


@dataclass(frozen=True)
class Pooled:
    """Tensor `name`, of whose rows the `parts` (number of rows, whether they are of key/value heads) follow one another."""

    name: str
    parts: tuple[tuple[int, bool], ...]
    before: int
    after: int
    pooling: Pooling
    key: str
    """Seeds random numbers."""

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        rows = sum(count * self.after // self.before if heads else count for count, heads in self.parts)
        return (rows, *source.shape(self.name)[1:])

    def make(self, source: WeightSource) -> Tensor:
        stored = source.tensor(self.name)
        pieces = zip(stored.split([count for count, _ in self.parts]), self.parts, strict=True)
        return torch.cat(
            [self._pooled(piece, place) if heads else piece for place, (piece, (_, heads)) in enumerate(pieces)]
        )

    def _pooled(self, stored: Tensor, place: int) -> Tensor:
        """[G * Dh, ...] to [g * Dh, ...], in the dtype of `stored`."""
        groups = stored.unflatten(0, (self.after, self.before // self.after, -1))
        if self.pooling == "first":
            return groups[:, 0].flatten(0, 1)
        if self.pooling == "random" and stored.dim() > 1:
            found = torch.empty(self.after * groups.shape[2], *stored.shape[1:])
            draw_initial(found, f"{self.key}/{place}", (0.0, stored.float().square().mean().sqrt().item()))
            return found.to(stored.dtype)
        return groups.double().mean(1).flatten(0, 1).to(stored.dtype)
