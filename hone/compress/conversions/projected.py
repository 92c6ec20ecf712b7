"""Tensors of a recurrent mixer that begins with the projections of softmax attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.compress.conversions.tensors import names_of, piece_of
from hone.model.config import ModelConfig
from hone.model.decoder import INIT_STD, draw_initial
from hone.model.linear_spec import NormSpec, Parameter
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import DeclaredTensor


def recipe(index: int, made: DeclaredTensor, source: ModelConfig, key: str) -> Projected | New | None:
    """How the tensor `made` of layer `index`, which had attention in `source`, is made; None: it is copied. `key` seeds what is new."""
    if not made.path.startswith("mixer.") or made.path == "mixer.out":
        return None
    first = names_of(source, index, "mixer.qkv")[0]
    if made.module is None:
        assert made.parameter is not None, f"{made.name} is no tensor of a layer"
        return New(first, made.shape, made.parameter, key)
    parts, begin = [], 0
    for piece in made.module.linear.pieces:
        if made.module.rows.start <= begin < made.module.rows.stop:
            parts.append((piece.name, piece.out_features))
        begin += piece.out_features
    return Projected(first, index, source, tuple(parts), made.shape, key)


@dataclass(frozen=True, eq=False)
class Projected:
    """Rows of queries, keys and values, the latter two once for each query head, and random ones of every other piece."""

    name: str
    index: int
    source: ModelConfig
    parts: tuple[tuple[str, int], ...]
    made: tuple[int, ...]
    key: str

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.made

    def make(self, source: WeightSource) -> Tensor:
        dtype = source.tensor(self.name).dtype
        return torch.cat([self._part(source, *one).to(dtype) for one in self.parts])

    def _part(self, source: WeightSource, piece: str, count: int) -> Tensor:
        if piece not in ("q", "k", "v"):
            found = torch.empty(count, self.made[1])
            draw_initial(found, f"{self.key}/{piece}", (0.0, INIT_STD))
            return found
        mixer = self.source.layers[self.index].mixer
        rows = piece_of(source, self.source, self.index, "mixer.qkv", piece)
        if piece == "q":
            return rows
        heads = rows.unflatten(0, (mixer.num_kv_heads, mixer.head_dim))
        return heads.repeat_interleave(mixer.num_heads // mixer.num_kv_heads, 0).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class New:
    """A norm of ones, or a parameter as it is first drawn, in the dtype of tensor `name`."""

    name: str
    made: tuple[int, ...]
    parameter: Parameter
    key: str

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.made

    def make(self, source: WeightSource) -> Tensor:
        found = torch.ones(self.made)
        if isinstance(self.parameter, NormSpec):
            found -= self.parameter.offset
        else:
            draw_initial(found, self.key, self.parameter.initial)
        return found.to(source.tensor(self.name).dtype)
