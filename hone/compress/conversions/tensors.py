"""The tensors of a converted model: copies of the given ones, but for those of which a conversion says how they are made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hone.model.config import ModelConfig
from hone.model.growth.checkpoint import Recipe, grown
from hone.model.growth.depth import Copied
from hone.model.weights.model import ModelSource
from hone.model.weights.source import WeightSource
from hone.model.weights.tensors import DeclaredTensor, end_tensors, layer_tensors

Special = Callable[[int, DeclaredTensor, ModelConfig, ModelConfig], Recipe | None]
"""How a tensor of the layer at an index of the second config is made of those of the first; None: it is copied."""


def converted(source: ModelSource, config: ModelConfig, special: Special) -> ModelSource:
    """The model of `config`, made of `source` when its tensors are read. Raises ArtifactError for tensors that `source` does not have."""
    source.empty()
    ends = zip(end_tensors(config), end_tensors(source.config), strict=True)
    recipes: dict[str, Recipe] = {made.name: Copied(given.name) for made, given in ends}
    for index in range(config.num_layers):
        given = {_place(one): one.name for one in layer_tensors(source.config, index)}
        for made in layer_tensors(config, index):
            recipes[made.name] = special(index, made, source.config, config) or Copied(given[_place(made)])
    return grown(source, config, recipes)


def _place(tensor: DeclaredTensor) -> tuple[str, int, int]:
    """What a tensor is, whatever its family calls it: its path, first row and axes."""
    return tensor.path, 0 if tensor.module is None else tensor.module.rows.start, len(tensor.shape)


def names_of(config: ModelConfig, index: int, path: str, axes: int = 2) -> list[str]:
    """The checkpoint names of the weights (`axes` 2) or biases (1) of the linear at `path` of layer `index`, in the order of its rows."""
    own = (one for one in layer_tensors(config, index) if one.path == path and len(one.shape) == axes)
    return [one.name for one in own]


def piece_of(source: WeightSource, config: ModelConfig, index: int, path: str, piece: str, axes: int = 2) -> Tensor:
    """The rows `piece` of the weight (`axes` 2) or bias (1) of the linear at `path` of layer `index`, however modules divide it."""
    begin, rows = 0, slice(0)
    for one in config.linears(index)[path].pieces:
        if one.name == piece:
            rows = slice(begin, begin + one.out_features)
        begin += one.out_features
    found = []
    for tensor in layer_tensors(config, index):
        if tensor.path == path and tensor.module is not None and len(tensor.shape) == axes:
            first, last = tensor.module.rows.start, tensor.module.rows.stop
            if first < rows.stop and last > rows.start:
                stored = source.tensor(tensor.name)
                found.append(stored[max(rows.start - first, 0) : min(rows.stop, last) - first])
    return torch.cat(found)
