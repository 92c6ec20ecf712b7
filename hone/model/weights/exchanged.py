"""Layers that ranks read together: each reads some of a layer's tensors and sends them to the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hone.base.ranks import Mesh
from hone.cost.work import balanced
from hone.model.decoder import DecoderLayer
from hone.model.weights.model import ModelSource
from hone.model.weights.source import View, WeightSource
from hone.model.weights.tensors import layer_modules


class ExchangedWeights(View):
    """The weights of `source`, some of which other ranks have sent: those are in memory."""

    def __init__(self, source: WeightSource, tensors: dict[str, Tensor]) -> None:
        super().__init__(source)
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else self.source.tensor(name)


def build_layer(source: ModelSource, index: int, device: str, dtype: torch.dtype, mesh: Mesh) -> DecoderLayer:
    """Layer `index` on every rank of `mesh`: each reads some of its matrices and sends them to the others.

    Alone it would copy the whole layer to its GPU, which is many times slower than from another GPU.
    """
    return exchanged(source, index, device, mesh).build_layer(index, device, dtype)


def exchanged(source: ModelSource, index: int, device: str, mesh: Mesh) -> ModelSource:
    """`source` with the matrices of layer `index` in the memory of every rank of `mesh`; with one rank `source` itself."""
    if mesh.world_size == 1:
        return source
    sizes = {f"{one.name}.weight": float(math.prod(one.shape)) for one in layer_modules(source.config, index)}
    there = set(source.names())  # a missing one is an error when the layer is built
    names = [name for name in sizes if name in there]
    readers = balanced([sizes[name] for name in names], mesh.world_size)
    mine = {name: source.tensor(name) for name, rank in zip(names, readers, strict=True) if rank == mesh.rank}
    return source.viewed(ExchangedWeights(source, mesh.exchange(mine, device)))
